"""The device mesh of a slice, over one or several host processes."""

from __future__ import annotations

import contextlib
from collections import Counter

import jax
import numpy as np
from jax.sharding import Mesh

from rayserve_moe.parallel.sharding import DATA, TENSOR, ParallelPlan


class MeshError(ValueError):
    """Devices that cannot be laid out as requested; the message names the numbers that do not divide."""


def use_cpu_devices(num_devices: int) -> None:
    """Emulate `num_devices` CPU devices in this process. Call before jax touches a device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")


def plan_for(devices: list[jax.Device], *, data_size: int = 1, num_slices: int = 1) -> ParallelPlan:
    """Lay `devices`, of all hosts, out in `data_size` data ranks of equally many devices.

    The devices of a host are neighbours, and so are the hosts of a slice: a data rank is within a slice, and within a
    host if its size divides the host's. Every host computes the same plan, in any order of the devices. Raises
    MeshError if `num_slices` or `data_size` does not divide.
    """
    ordered = _by_slice(devices, num_slices)
    if data_size < 1 or len(ordered) % data_size:
        raise MeshError(
            f"data_parallel_size {data_size} does not divide the {len(ordered)} devices; choose a divisor of "
            f"{len(ordered)}"
        )
    if data_size % num_slices:
        raise MeshError(
            f"num_slices {num_slices} does not divide data_parallel_size {data_size}: a data rank cannot span two "
            f"slices; choose a multiple of {num_slices}"
        )
    return ParallelPlan(Mesh(np.asarray(ordered).reshape(data_size, -1), (DATA, TENSOR)), num_slices)


def platform_of(mesh: Mesh) -> str:
    """Return jax's platform name of a mesh's devices: `cpu`, `gpu` or `tpu`."""
    return mesh.devices.flat[0].platform


def cores_of(mesh: Mesh) -> int:
    """Return the number of cores of each device of a mesh; 1 if the device does not report it."""
    return getattr(mesh.devices.flat[0], "num_cores", None) or 1


def multiplies_e4m3(mesh: Mesh) -> bool:
    """Return True if the devices of a mesh multiply e4m3 as it is, or compute by XLA on a CPU."""
    return platform_of(mesh) == "cpu" or "7x" in mesh.devices.flat[0].device_kind


def _by_slice(devices: list[jax.Device], num_slices: int) -> list[jax.Device]:
    """Return devices ordered by slice, host, and number within the host; check the number and size of slices.

    Devices without a slice index, or all with the same index, are cut into `num_slices` runs of hosts.
    """
    ordered = sorted(devices, key=lambda device: (_slice_id(device), device.process_index, device.id))
    sizes = Counter(_slice_id(device) for device in ordered)
    if len(sizes) > 1 and len(sizes) != num_slices:
        raise MeshError(f"the devices are on {len(sizes)} slices, but num_slices is {num_slices}")
    if num_slices < 1 or len(ordered) % num_slices or len(set(sizes.values())) > 1:
        raise MeshError(f"{len(ordered)} devices do not spread evenly over num_slices {num_slices}")
    return ordered


def _slice_id(device: jax.Device) -> int:
    """Return the platform's slice index of a device; 0 if it reports none."""
    return getattr(device, "slice_index", 0)


def local_devices(count: int) -> list[jax.Device]:
    """Return `count` devices of this process (0: all accelerators, or a single CPU device).

    CPU devices are emulated on demand, as long as jax has not started. Raises ValueError with the remedy if there are
    too few devices.
    """
    if count > 1 and jax.config.values["jax_num_cpu_devices"] < count:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.local_devices()
    wanted = count or (1 if devices[0].platform == "cpu" else len(devices))
    if len(devices) < wanted:
        raise ValueError(
            f"{wanted} devices are required, jax has {len(devices)}: on a CPU, create the engine before anything else "
            f"uses jax, or set JAX_NUM_CPU_DEVICES={wanted}"
        )
    return devices[:wanted]
