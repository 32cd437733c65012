"""The device mesh of a slice, over one or several host processes."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
from jax.sharding import Mesh

from rayserve_moe.parallel.sharding import DATA, TENSOR, ParallelPlan

HEARTBEAT_TIMEOUT_S = 10


def use_cpu_devices(num_devices: int) -> None:
    """Emulate `num_devices` CPU devices in this process; call before jax touches a device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")


def join_hosts(coordinator: str, *, num_hosts: int, host_id: int) -> None:
    """Enter the group of `num_hosts` processes led by `coordinator` (host:port); call before using a device."""
    jax.distributed.initialize(
        coordinator, num_hosts, host_id, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S, initialization_timeout=120
    )


def leave_hosts() -> None:
    """Leave the group, so that the coordinator does not report this process as lost."""
    jax.distributed.shutdown()


def plan_for(devices: list[jax.Device]) -> ParallelPlan:
    """Lay all `devices` on the tensor axis: heads and experts split over every device."""
    return ParallelPlan(Mesh(np.asarray(devices).reshape(1, len(devices)), (DATA, TENSOR)))


def local_devices(count: int) -> list[jax.Device]:
    """Take `count` devices of this process (0: all of an accelerator, one of a CPU).

    CPU devices are emulated on demand, as long as jax has not started. ValueError names the remedy where there are
    too few.
    """
    if count > 1 and jax.config.values["jax_num_cpu_devices"] < count:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.local_devices()
    wanted = count or (1 if devices[0].platform == "cpu" else len(devices))
    if len(devices) < wanted:
        raise ValueError(
            f"{wanted} devices are wanted, jax has {len(devices)}: on a CPU, create the engine before anything else "
            f"uses jax, or set JAX_NUM_CPU_DEVICES={wanted}"
        )
    return devices[:wanted]
