"""Chips, hosts and devices of a TPU slice, by topology and generation.

It computes with the published numbers of each generation and does not query a cluster.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rayserve_moe.config.settings import ClusterSettings, ParallelSettings, SettingsError

OTHER_SPELLINGS = {"v5litepod": "v5e", "v5lite": "v5e", "tpu7x": "v7x", "7x": "v7x"}

FLAT = frozenset({"1x1", "2x2", "2x4", "2x8", "4x4", "4x8", "8x8", "8x16", "16x16"})
"""Topologies of the generations with two-dimensional slices."""

SMALL_CUBES = frozenset({"2x2x1", "2x2x2", "2x2x4", "2x4x4"})
"""Three-dimensional topologies smaller than a cube of 4x4x4 chips; larger ones consist of such cubes."""

CHIPS_PER_HOST = 4
MAX_CHIPS_PER_HOST = 8


@dataclass(frozen=True)
class Generation:
    """TPU generation."""

    num_dims: int
    """Number of dimensions of its topologies."""
    devices_per_chip: int = 1
    """Number of jax devices per chip."""


GENERATIONS = {
    "v4": Generation(3),
    "v5e": Generation(2),
    "v5p": Generation(3),
    "v6e": Generation(2),
    "v7x": Generation(3, devices_per_chip=2),
}


@dataclass(frozen=True)
class TpuSlice:
    """TPU slice."""

    version: str
    """Key of GENERATIONS."""
    topology: str
    chips_per_host: int

    @property
    def num_chips(self) -> int:
        return num_chips(self.topology)

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host

    @property
    def devices_per_host(self) -> int:
        """Return the number of jax devices per host."""
        return self.chips_per_host * GENERATIONS[self.version].devices_per_chip

    def __str__(self) -> str:
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        devices = "" if self.devices_per_host == self.chips_per_host else f" ({self.devices_per_host} devices)"
        return f"{hosts} of {self.chips_per_host} chips{devices}"


def generation_name(version: str) -> str:
    """Return the key of GENERATIONS for a common spelling such as `v5litepod`, `tpu7x` or `TPU-V6E`.

    Raises: SettingsError for an unknown generation.
    """
    name = version.strip().lower().removeprefix("tpu-")
    name = OTHER_SPELLINGS.get(name, name)
    if name not in GENERATIONS:
        raise SettingsError(f"tpu_version {version!r} is unknown: write one of {', '.join(GENERATIONS)}")
    return name


def num_chips(topology: str) -> int:
    """Return the number of chips of a topology such as `2x4` or `2x4x4`.

    Raises: SettingsError for another syntax.
    """
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", topology):
        raise SettingsError(f"tpu_topology {topology!r} is invalid: write chips per dimension, such as 2x4 or 2x4x4")
    return math.prod(map(int, topology.split("x")))


def possible_slices(topology: str, version: str) -> tuple[TpuSlice, ...]:
    """Return the slices that a topology may denote.

    They are two if hosts may have 4 or 8 chips (v5e and v6e `2x4`), else a single one.

    Raises: SettingsError if the version, or the topology of that version, does not exist.
    """
    name, shape = generation_name(version), topology.strip().lower()
    chips = num_chips(shape)
    _check_shape(shape, name)
    if chips == MAX_CHIPS_PER_HOST and shape in FLAT:
        return TpuSlice(name, shape, CHIPS_PER_HOST), TpuSlice(name, shape, MAX_CHIPS_PER_HOST)
    return (TpuSlice(name, shape, min(CHIPS_PER_HOST, chips)),)


def slice_for(cluster: ClusterSettings, *, num_hosts: int, num_slices: int) -> TpuSlice:
    """Return the slice in the settings; `num_slices` of them have `num_hosts` hosts in total.

    If the topology leaves the hosts open, `tpu_chips_per_host` decides, else `num_hosts`.

    Raises: SettingsError with all numbers if they contradict each other.
    """
    slices = possible_slices(cluster.tpu_topology, cluster.tpu_version)
    name = f"a {slices[0].version} slice of topology {slices[0].topology} ({slices[0].num_chips} chips)"
    if cluster.tpu_chips_per_host:
        by_host = {tpu.chips_per_host: tpu for tpu in slices}
        if cluster.tpu_chips_per_host not in by_host:
            raise SettingsError(
                f"{name} has hosts of {' or '.join(map(str, by_host))} chips, tpu_chips_per_host is "
                f"{cluster.tpu_chips_per_host}: set it to {' or '.join(map(str, by_host))}"
            )
        slices = (by_host[cluster.tpu_chips_per_host],)
    fitting = [tpu for tpu in slices if tpu.num_hosts * num_slices == num_hosts]
    if not fitting:
        counts = " or ".join(str(tpu.num_hosts * num_slices) for tpu in slices)
        raise SettingsError(
            f"{name} is {' or '.join(map(str, slices))}, num_slices is {num_slices}, num_hosts (of all slices) is "
            f"{num_hosts}: set num_hosts to {counts}"
        )
    return fitting[0]


def check_slices(cluster: ClusterSettings, parallel: ParallelSettings) -> None:
    """Check hosts, devices and data ranks against the slices to reserve, if any.

    Raises: SettingsError with all numbers if they contradict each other.
    """
    if not cluster.tpu_topology:
        return
    if cluster.platform not in ("auto", "tpu"):
        raise SettingsError(f"tpu_topology reserves TPUs, and platform is {cluster.platform}: remove one of them")
    tpu = slice_for(cluster, num_hosts=parallel.num_hosts, num_slices=parallel.num_slices)
    name = f"{tpu.version} {tpu.topology}"
    if parallel.devices_per_host not in (0, tpu.devices_per_host):
        raise SettingsError(
            f"a host of {name} has {tpu.chips_per_host} chips and {tpu.devices_per_host} devices, devices_per_host is "
            f"{parallel.devices_per_host}: set it to {tpu.devices_per_host}, or leave it at 0"
        )
    num_devices, data_size = parallel.num_hosts * tpu.devices_per_host, parallel.data_parallel_size
    if num_devices % data_size:
        raise SettingsError(
            f"data_parallel_size {data_size} does not divide the {num_devices} devices of {parallel.num_hosts} hosts "
            f"of {name} with {tpu.devices_per_host} devices each: set it to a divisor of {num_devices}"
        )


def _check_shape(shape: str, version: str) -> None:
    sizes = [int(size) for size in shape.split("x")]
    num_dims = GENERATIONS[version].num_dims
    if num_dims == 2:
        exists, known = shape in FLAT, sorted(FLAT, key=num_chips)
    else:
        is_large = len(sizes) == 3 and all(size % 4 == 0 for size in sizes)
        exists, known = shape in SMALL_CUBES or is_large, [*sorted(SMALL_CUBES, key=num_chips), "multiples of 4x4x4"]
    if not exists:
        raise SettingsError(f"{version} has no topology {shape}: it has {', '.join(known)}")
