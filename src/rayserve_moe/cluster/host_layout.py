"""What a process is of its group of hosts: it meets the others, and lays the model out over the devices of all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.cluster.heartbeat import JOINING, LOADING
from rayserve_moe.config.derive import sent_copies
from rayserve_moe.config.load import set_compiler_flag, set_environment_defaults
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings
from rayserve_moe.execution.fewer_hosts import Parts, settings_of_any_size
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.execution.weights.placing import open_model
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.observability.fault_points import reach
from rayserve_moe.parallel.joining import join_hosts
from rayserve_moe.parallel.mesh import local_devices, plan_for, use_cpu_devices
from rayserve_moe.parallel.sharding import ParallelPlan

ONE_THREAD_BYTES = 32 * 2**20
"""Where the checkpoint is smaller, XLA gets one thread of a CPU host: sharing such short steps takes more CPU time than
they have, and gains nothing."""
XLA_THREADS = "PJRT_NPROC"
"""The variable XLA reads its number of threads from, of which every device gets one at least; yours wins."""


def limit_threads(model_path: str | Path) -> None:
    """Have XLA compute a small checkpoint with one thread of this process; call before jax touches a device."""
    if open_checkpoint(model_path).num_bytes < ONE_THREAD_BYTES:
        set_environment_defaults({XLA_THREADS: "1"})


def limit_collectives(timeout_s: float) -> None:
    """Have collectives between CPU hosts fail where a peer does not come; XLA's own limit is 30 minutes."""
    set_compiler_flag("xla_cpu_collective_timeout_seconds", math.ceil(timeout_s))


@dataclass(frozen=True)
class HostPlace:
    """Which host of how many this is, how many devices it emulates (0: those it has), and how all are laid out.

    Emulated hosts wait for each other in a collective for `collective_timeout_s`. `parts` are there where the group may
    do without some. Host memory is to hold `sent_copies` of its weights too; the latter number where they are kept.
    """

    host_id: int
    num_hosts: int
    num_cpu_devices: int
    data_size: int = 1
    num_slices: int = 1
    collective_timeout_s: float = 120.0
    parts: Parts | None = None
    sent_copies: tuple[int, int] = (0, 0)


def place_of(
    host_id: int, parallel: ParallelSettings, *, cluster: ClusterSettings, parts: Parts | None = None
) -> HostPlace:
    """What a host is of its group."""
    return HostPlace(
        host_id,
        parallel.num_hosts,
        num_cpu_devices=0 if cluster.tpu_topology else max(1, parallel.devices_per_host),
        data_size=parallel.data_parallel_size,
        num_slices=parallel.num_slices,
        collective_timeout_s=cluster.step_timeout_s,
        parts=parts,
        sent_copies=sent_copies(cluster),
    )


def lay_out(
    settings: RunnerSettings, place: HostPlace, *, coordinator: str, enter: Callable[[str], object] = lambda _: None
) -> tuple[RunnerSettings, ParallelPlan]:
    """Meet the other hosts; returns how the model is computed, and the devices of all. `enter` notes the phase."""
    if place.num_cpu_devices:
        limit_threads(settings.model.path)
        if place.num_hosts > 1:
            limit_collectives(place.collective_timeout_s)
        use_cpu_devices(place.num_cpu_devices)
    if place.num_hosts > 1:
        enter(JOINING)
        join_hosts(coordinator, num_hosts=place.num_hosts, host_id=place.host_id)
        reach("joined", place)
        devices = jax.devices()
    else:
        devices = local_devices(place.num_cpu_devices)
    enter(LOADING)
    plan = plan_for(devices, data_size=place.data_size, num_slices=place.num_slices)
    if place.parts is not None:
        spec = spec_from_config(open_model(settings.model).config)
        settings = settings_of_any_size(settings, spec=spec, plan=plan)
    return settings, plan
