"""What a group settles before a host is lost: how it computes with fewer, and memory for them, and for kept weights."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution.memory import bytes_on_device, memory_available, rounded_down
from rayserve_moe.execution.served_model import RunnerSettings, ServedModel, served_model
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import plan_for, platform_of
from rayserve_moe.parallel.sharding import ParallelPlan


class Parts(NamedTuple):
    """Slices, or emulated hosts, that a group has now, and the fewest that it serves with."""

    now: int
    least: int


def settings_of_any_size(settings: RunnerSettings, *, spec: ModelSpec, plan: ParallelPlan) -> RunnerSettings:
    """Settings under which a model is computed alike on this mesh and on one of fewer hosts.

    An expert slot is added to each of as many ranks as it takes for slots to divide by them, and CPU kernels are those
    that several devices have, also where one is left.
    """
    experts, compiling = settings.experts, settings.compile
    divides = -spec.router.num_experts % plan.num_expert_ranks
    return replace(
        settings,
        experts=replace(experts, num_redundant=max(experts.num_redundant, divides)),
        compile=replace(compiling, cpu_kernels="off") if compiling.cpu_kernels == "auto" else compiling,
    )


def pages_with_fewest(served: ServedModel, parts: Parts, *, free: int) -> int:
    """KV pages of a data rank where as few parts serve as may be, if devices have `free` bytes beside their share now.

    SettingsError where the experts of all leave no memory for two pages.
    """
    plan = served.config.plan
    devices = list(plan.mesh.devices.flat)
    fewer = plan_for(
        devices[: len(devices) * parts.least // parts.now],
        data_size=plan.data_size * parts.least // parts.now,
        num_slices=max(1, plan.num_slices * parts.least // parts.now),
    )
    spec = served.config.spec
    settings = settings_of_any_size(served.settings, spec=spec, plan=fewer)
    draft = None if served.draft is None else served.draft.draft
    then = served_model(spec, fewer, settings=settings, draft=draft)
    return then.num_pages_within(free - _held(then) + _held(served))


def pages_beside_copies(served: ServedModel, num_pages: int, *, num_copies: int, share_bytes: int) -> int:
    """KV pages of a data rank, up to `num_pages`, that leave host memory for `num_copies` of this host's share.

    The weights are loaded. SettingsError where memory does not hold as many copies, beside the pages on a CPU. Other
    hosts of this machine are not looked at.
    """
    if num_copies <= 0:
        return num_pages
    mesh, free = served.config.plan.mesh, memory_available() - num_copies * share_bytes
    devices = list(mesh.local_devices)
    if platform_of(mesh) == "cpu" and free > 0:
        num_pages = min(num_pages, served.num_pages_within(rounded_down(free // len(devices))))
        if served.pool.cache.num_pages:  # not those that fit
            free -= bytes_on_device(served.state(num_pages)) * len(devices)
    if free < 0:
        what = (
            f"{num_copies} copies of {share_bytes} bytes take {-free} bytes more than host memory has beside KV pages"
        )
        raise SettingsError(f"keep_sent_weights: {what}; take auto, which keeps what fits, or off")
    return num_pages


def _held(served: ServedModel) -> int:
    """Bytes of a device's share of the weights, and of its staging area."""
    return bytes_on_device(served.weights) + bytes_on_device(served.staging)
