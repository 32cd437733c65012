"""Published figures of TPU chips: the only constants that a step-time estimate is made of, besides its overhead."""

from __future__ import annotations

from dataclasses import dataclass

OVERHEAD_S = 1.2e-6
"""What an op costs beyond its work: what XLA's own cost model charges for the smallest one. No device confirmed it."""


@dataclass(frozen=True)
class Chip:
    """One chip; rates are per second and for the whole chip.

    `clock_hz` is cycles, `peak_flops` is bfloat16, `link_bytes` one link in one direction. A chip has
    `num_links` links, `num_cores` cores with a schedule each, and shows as `num_devices` devices. Axes of a slice are
    rings from `ring_length` chips on: each axis for itself with four links a chip, only all together with six.
    `device_capacity` are the bytes of HBM that a program may use on a device, `core_vmem` those of a core's own memory.
    """

    clock_hz: float
    hbm_bytes: float
    peak_flops: float
    link_bytes: float
    num_links: int
    num_cores: int
    num_devices: int
    ring_length: int
    device_capacity: int
    core_vmem: int

    @property
    def cores_per_device(self) -> int:
        return self.num_cores // self.num_devices

    @property
    def device_hbm_bytes(self) -> float:
        """HBM bytes per second of one device."""
        return self.hbm_bytes / self.num_devices

    @property
    def device_flops(self) -> float:
        """Peak bfloat16 operations per second of one device."""
        return self.peak_flops / self.num_devices

    def is_ring(self, shape: tuple[int, ...], axis: int) -> bool:
        """Whether the last chip of an axis is linked to the first one in a slice of `shape` chips."""
        if self.num_links == 4:
            return shape[axis] >= self.ring_length
        return all(size % self.ring_length == 0 for size in shape)


def _gib(size: float) -> int:
    return int(size * (1 << 30))


CHIPS: dict[str, Chip] = {
    "v5e": Chip(
        1.50e9,
        819e9,
        197e12,
        4.5e10,
        num_links=4,
        num_cores=1,
        num_devices=1,
        ring_length=16,
        device_capacity=_gib(15.75),
        core_vmem=128 << 20,
    ),
    "v5p": Chip(
        1.75e9,
        2765e9,
        459e12,
        9e10,
        num_links=6,
        num_cores=2,
        num_devices=1,
        ring_length=4,
        device_capacity=_gib(95.74),
        core_vmem=64 << 20,
    ),
    "v6e": Chip(
        1.75e9,
        1638e9,
        918e12,
        9e10,
        num_links=4,
        num_cores=1,
        num_devices=1,
        ring_length=16,
        device_capacity=_gib(31.25),
        core_vmem=128 << 20,
    ),
    "tpu7x": Chip(
        2.20e9,
        7380e9,
        2307e12,
        9e10,
        num_links=6,
        num_cores=2,
        num_devices=2,
        ring_length=4,
        device_capacity=_gib(94.75),
        core_vmem=64 << 20,
    ),
}
"""By the first part of a topology's name.

HBM, peak flop/s and cores: https://docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e and /tpu7x. Links per chip: 2-D and
3-D torus there. Bytes of a link and where rings close: https://jax-ml.github.io/scaling-book/tpus (v5e 4.5e10, v5p and
v6e 9e10; the specifications divided by links and directions say 5e10 and 1e11); tpu7x is in neither by link, and is
taken like v5p, whose 1200 GB/s per chip it shares.
Clocks are not published; they are peak / (cores x matrix units x rows x columns x 2 x rows fed in a cycle): v5e
197e12 / (4 x 128 x 128 x 2), v5p 459e12 / (2 x 4 x 128 x 128 x 2), v6e 918e12 / (2 x 256 x 256 x 2 x 2), tpu7x
2307e12 / (2 x 2 x 256 x 256 x 2 x 2). Units as `jax.experimental.pallas.tpu.get_tpu_info` has them; two rows a cycle on
the last two is inferred from schedules, which do 82 % of that peak. Capacity: what libtpu's compiler says is available
when it refuses a program (`tools.compile_check.hbm_limit`).
"""


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as `v6e:2x4`; ValueError lists those that there are figures for."""
    name = topology.split(":")[0]
    if name not in CHIPS:
        raise ValueError(f"there are no figures for the chip {name}; there are for {', '.join(CHIPS)}")
    return CHIPS[name]
