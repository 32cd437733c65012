"""What a TPU slice of a topology and generation consists of: chips, hosts, devices.

Plain arithmetic on the published numbers of each generation; no cluster is asked.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rayserve_moe.config.settings import ClusterSettings, ParallelSettings, SettingsError

OTHER_SPELLINGS = {"v5litepod": "v5e", "v5lite": "v5e", "tpu7x": "v7x", "7x": "v7x"}

FLAT = frozenset({"1x1", "2x2", "2x4", "2x8", "4x4", "4x8", "8x8", "8x16", "16x16"})
"""Topologies of the generations whose chips lie in a plane."""

SMALL_CUBES = frozenset({"2x2x1", "2x2x2", "2x2x4", "2x4x4"})
"""Topologies smaller than a cube of 4x4x4 chips; larger ones are made of such cubes."""

CHIPS_PER_HOST = 4
MOST_CHIPS_PER_HOST = 8


@dataclass(frozen=True)
class Generation:
    """Dimensions of its topologies, and devices that jax sees per chip."""

    num_dims: int
    devices_per_chip: int = 1


GENERATIONS = {
    "v4": Generation(3),
    "v5e": Generation(2),
    "v5p": Generation(3),
    "v6e": Generation(2),
    "v7x": Generation(3, devices_per_chip=2),
}


@dataclass(frozen=True)
class TpuSlice:
    """One slice: generation (a key of GENERATIONS), topology, and the chips of each of its hosts."""

    version: str
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
        """Devices that jax sees on a host."""
        return self.chips_per_host * GENERATIONS[self.version].devices_per_chip

    def __str__(self) -> str:
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        devices = "" if self.devices_per_host == self.chips_per_host else f" ({self.devices_per_host} devices)"
        return f"{hosts} of {self.chips_per_host} chips{devices}"


def generation_name(version: str) -> str:
    """The key of GENERATIONS for a name that people write, such as `v5litepod`, `tpu7x` or `TPU-V6E`."""
    name = version.strip().lower().removeprefix("tpu-")
    name = OTHER_SPELLINGS.get(name, name)
    if name not in GENERATIONS:
        raise SettingsError(f"tpu_version {version!r} is unknown: write one of {', '.join(GENERATIONS)}")
    return name


def num_chips(topology: str) -> int:
    """Chips of a topology such as `2x4` or `2x4x4`."""
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", topology):
        raise SettingsError(f"tpu_topology {topology!r} is none: write chips per dimension, such as 2x4 or 2x4x4")
    return math.prod(map(int, topology.split("x")))


def possible_slices(topology: str, version: str) -> tuple[TpuSlice, ...]:
    """The slices that a topology may mean: two where hosts of 4 and of 8 chips can make it up (v5e and v6e `2x4`).

    SettingsError for a version, or a topology of that version, that does not exist.
    """
    name, shape = generation_name(version), topology.strip().lower()
    chips = num_chips(shape)
    _check_shape(shape, name)
    if chips == MOST_CHIPS_PER_HOST and shape in FLAT:
        return TpuSlice(name, shape, CHIPS_PER_HOST), TpuSlice(name, shape, MOST_CHIPS_PER_HOST)
    return (TpuSlice(name, shape, min(CHIPS_PER_HOST, chips)),)


def slice_for(cluster: ClusterSettings, *, num_hosts: int, num_slices: int) -> TpuSlice:
    """The slice that the settings name, of which `num_slices` have `num_hosts` hosts.

    Where the topology leaves the hosts open, `tpu_chips_per_host` decides, else `num_hosts`. SettingsError names all
    numbers where they do not agree.
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
    """Check hosts, devices and data ranks against the slices to reserve, if any. SettingsError names all numbers."""
    if not cluster.tpu_topology:
        return
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
