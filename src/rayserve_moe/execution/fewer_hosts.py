"""Provisions for lost hosts: settings that suit fewer hosts, and memory for them and for kept weights."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rayserve_moe.config.settings import ExpertSettings, SettingsError
from rayserve_moe.execution.memory import bytes_on_device, memory_available, rounded_down
from rayserve_moe.execution.served_model import RunnerSettings, ServedModel, beside_weights, served_model
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import plan_for, platform_of
from rayserve_moe.parallel.sharding import ParallelPlan


class Parts(NamedTuple):
    """Slices, or emulated hosts, of a group."""

    now: int
    """Current number."""
    minimum: int
    """Minimum number with which the group continues."""


def settings_of_any_size(settings: RunnerSettings, *, spec: ModelSpec, plan: ParallelPlan) -> RunnerSettings:
    """Return settings that compute a model in the same way on this mesh and on a mesh of fewer hosts.

    Expert slots are added until slots divide by the ranks. CPU kernels are those for several devices, even if only a
    single device is left.
    """
    experts, compiling = settings.experts, settings.compile
    wanted = wanted_redundancy(experts, num_experts=spec.router.num_experts, ep_size=plan.num_expert_ranks)
    return replace(
        settings,
        experts=replace(experts, num_redundant=wanted),
        compile=replace(compiling, cpu_kernels="off") if compiling.cpu_kernels == "auto" else compiling,
    )


def wanted_redundancy(experts: ExpertSettings, *, num_experts: int, ep_size: int) -> int:
    """Return the redundant slots of the settings, or those with which the ranks divide all slots if these are more."""
    return max(experts.num_redundant, -num_experts % ep_size)


def pages_with_fewest(served: ServedModel, parts: Parts, *, free: int) -> int:
    """Return the KV pages of a data rank that fit when only the minimum number of parts is left.

    `free` are the bytes that a device has beside its current share.

    Raises: SettingsError if the experts leave no memory for two pages.
    """
    plan = served.config.plan
    devices = list(plan.mesh.devices.flat)
    fewer = plan_for(
        devices[: len(devices) * parts.minimum // parts.now],
        data_size=plan.data_size * parts.minimum // parts.now,
        num_slices=max(1, plan.num_slices * parts.minimum // parts.now),
    )
    spec = served.config.spec
    settings = settings_of_any_size(served.settings, spec=spec, plan=fewer)
    draft = None if served.draft is None else served.draft.draft
    then = served_model(spec, fewer, settings=settings, draft=draft)
    return then.num_pages_within(free - _held(then) + _held(served))


def pages_beside_copies(served: ServedModel, num_pages: int, *, num_copies: int, share_bytes: int) -> int:
    """Return the KV pages of a data rank that leave host memory for `num_copies` of this host's share.

    At most `num_pages` are returned. The weights must be loaded. Other hosts of this machine are not considered.

    Raises: SettingsError if memory does not hold the copies (on a CPU, beside the pages).
    """
    if num_copies <= 0:
        return num_pages
    mesh, free = served.config.plan.mesh, memory_available() - num_copies * share_bytes
    devices = list(mesh.local_devices)
    if platform_of(mesh) == "cpu" and free > 0:
        num_pages = min(num_pages, served.num_pages_within(rounded_down(free // len(devices))))
        if served.pool.cache.num_pages:  # an explicit number may not fit
            free -= bytes_on_device(served.state(num_pages)) * len(devices)
    if free < 0:
        excess = f"{num_copies} copies of {share_bytes} bytes exceed host memory beside KV pages by {-free} bytes"
        raise SettingsError(f"keep_sent_weights: {excess}; set auto, which keeps as many as fit, or off")
    return num_pages


def _held(served: ServedModel) -> int:
    """Return the bytes of a device's share of the weights and of its staging area."""
    return bytes_on_device(served.weights) + bytes_on_device(beside_weights(served))
