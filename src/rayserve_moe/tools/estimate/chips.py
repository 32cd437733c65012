"""Published figures of TPU chips; `rates` has what devices reach of them."""

from __future__ import annotations

from dataclasses import dataclass

OVERHEAD_S = 1.2e-6
"""Cost of an op beyond its work, as XLA's own cost model charges the smallest op. Not confirmed on a device."""


@dataclass(frozen=True)
class Chip:
    """A chip; rates are per second and for the whole chip."""

    clock_hz: float
    hbm_bytes: float
    peak_flops: float
    """bfloat16 operations."""
    link_bytes: float
    """Bytes per second of a link in a single direction."""
    num_links: int
    num_cores: int
    """Each core has its own schedule."""
    num_devices: int
    """Devices that jax shows per chip."""
    ring_length: int
    """Minimum axis length, in chips, at which an axis of a slice is a ring.

    With four links per chip this holds for each axis separately, with six only if all axes are multiples of it.
    """
    device_capacity: int
    """Bytes of HBM that a program may use on a device."""
    core_vmem: int
    """Bytes of a core's own memory."""
    hbm_share: float
    """Share of the peak bandwidth of HBM that copies reach (`rates.CONSTANTS`)."""
    matrix_units: int
    """Matrix units of a core."""
    matrix_cycles: int
    """Cycles that a bfloat16 matrix instruction of a schedule occupies its unit."""

    @property
    def cores_per_device(self) -> int:
        return self.num_cores // self.num_devices

    @property
    def device_hbm_bytes(self) -> float:
        """Return the HBM bytes per second of a device."""
        return self.hbm_bytes / self.num_devices

    @property
    def device_flops(self) -> float:
        """Return the peak bfloat16 operations per second of a device."""
        return self.peak_flops / self.num_devices

    def is_ring(self, shape: tuple[int, ...], axis: int) -> bool:
        """Return True if the last chip of an axis is linked to the first in a slice of `shape` chips."""
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
        hbm_share=0.86,
        matrix_units=4,
        matrix_cycles=16,
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
        hbm_share=0.86,
        matrix_units=4,
        matrix_cycles=16,
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
        hbm_share=0.86,
        matrix_units=2,
        matrix_cycles=8,
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
        hbm_share=0.86,
        matrix_units=2,
        matrix_cycles=8,
    ),
}
"""By the first part of a topology's name.

HBM, peak flop/s and cores: https://docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e and /tpu7x. Links per chip: 2-D and
3-D torus there. Bytes of a link and ring lengths: https://jax-ml.github.io/scaling-book/tpus (v5e 4.5e10, v5p and v6e
9e10; the specifications divided by links and directions give 5e10 and 1e11). tpu7x has no figure per link in either; it
is assumed equal to v5p, because both have 1200 GB/s per chip. Clocks are not published; they are peak / (cores x matrix
units x rows x columns x 2 x rows fed in a cycle): v5e 197e12 / (4 x 128 x 128 x 2), v5p 459e12 / (2 x 4 x 128 x 128 x
2), v6e 918e12 / (2 x 256 x 256 x 2 x 2), tpu7x 2307e12 / (2 x 2 x 256 x 256 x 2 x 2). Units are from
`jax.experimental.pallas.tpu.get_tpu_info`; two rows per cycle on the last two chips are inferred from schedules, which
reach 82 % of that peak. A matrix instruction takes in 16 rows of bfloat16, at one or two rows per cycle. Capacity: the
value that libtpu's compiler reports when it rejects a program (`tools.compile_check.hbm_limit`).
"""


def chip_of(topology: str) -> Chip:
    """Return the chip of a topology such as `v6e:2x4`. Raises ValueError with the known chips."""
    name = topology.split(":")[0]
    if name not in CHIPS:
        raise ValueError(f"no figures for the chip {name}; known chips: {', '.join(CHIPS)}")
    return CHIPS[name]
