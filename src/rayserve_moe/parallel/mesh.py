"""The device mesh of a slice, over one or several host processes."""

from __future__ import annotations

import contextlib
from collections import Counter

import jax
import numpy as np
from jax.sharding import Mesh

from rayserve_moe.parallel.sharding import DATA, TENSOR, ParallelPlan


class MeshError(ValueError):
    """Devices that cannot be laid out as asked; the message names what does not divide."""


def use_cpu_devices(num_devices: int) -> None:
    """Emulate `num_devices` CPU devices in this process; call before jax touches a device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")


def plan_for(devices: list[jax.Device], *, data_size: int = 1, num_slices: int = 1) -> ParallelPlan:
    """Lay `devices`, those of all hosts, on `data_size` data ranks of equally many devices each.

    The devices of a host are neighbours, and so are the hosts of a slice: a data rank lies within one slice, and
    within one host where its size divides a host's. Every host computes the same plan, in any order of the
    devices. MeshError where `num_slices` or `data_size` does not divide.
    """
    ordered = _by_slice(devices, num_slices)
    if data_size < 1 or len(ordered) % data_size:
        raise MeshError(
            f"data_parallel_size {data_size} does not divide the {len(ordered)} devices; choose a divisor of "
            f"{len(ordered)}"
        )
    if data_size % num_slices:
        raise MeshError(
            f"num_slices {num_slices} does not divide data_parallel_size {data_size}: a data rank cannot lie on two "
            f"slices; choose a multiple of {num_slices}"
        )
    return ParallelPlan(Mesh(np.asarray(ordered).reshape(data_size, -1), (DATA, TENSOR)), num_slices)


def platform_of(mesh: Mesh) -> str:
    """What all devices of a mesh are, as jax names it: `cpu` or `tpu`."""
    return mesh.devices.flat[0].platform


def cores_of(mesh: Mesh) -> int:
    """How many cores each device of a mesh has; what does not say so has one."""
    return getattr(mesh.devices.flat[0], "num_cores", None) or 1


def _by_slice(devices: list[jax.Device], num_slices: int) -> list[jax.Device]:
    """Order by slice, host, and number within the host; slices must be as many as asked for, and of one size.

    Devices that know of no slice, or all of the same one, are cut into `num_slices` runs of hosts.
    """
    ordered = sorted(devices, key=lambda device: (_slice_id(device), device.process_index, device.id))
    sizes = Counter(_slice_id(device) for device in ordered)
    if len(sizes) > 1 and len(sizes) != num_slices:
        raise MeshError(f"the devices lie on {len(sizes)} slices, num_slices is {num_slices}")
    if num_slices < 1 or len(ordered) % num_slices or len(set(sizes.values())) > 1:
        raise MeshError(f"{len(ordered)} devices do not spread evenly over num_slices {num_slices}")
    return ordered


def _slice_id(device: jax.Device) -> int:
    """The slice that the platform says a device lies on; 0 where it says nothing."""
    return getattr(device, "slice_index", 0)


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
