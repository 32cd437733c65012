"""Which sizes of a step are worth compiling: seconds lost to padding against seconds spent on compiling.

Plain arithmetic over a model of what steps cost. It looks at no clock and at nothing of the machine it runs on, so all
hosts of a group choose the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

Seconds = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Seconds of a step of `real` items in a shape that holds `size` of them, elementwise and broadcast."""

ROUND_BITS = 3


@dataclass(frozen=True)
class Device:
    """What a device does in a second, and what one more shape costs at the start.

    `block_s` is what an attention block costs in a layer even where it is padding. `compile_s` is by how much one more
    shape prolongs the start, others being compiled beside it; it has to earn that back within `horizon_s` of steps.
    Where `fills_blocks`, an expert computes whole blocks of rows, as large as its mean load in a full step. A step has
    at least `least_singles` single tokens, if only of padding.
    """

    bytes_per_s: float
    flops: float
    block_s: float
    compile_s: float
    horizon_s: float
    fills_blocks: bool = False
    least_singles: int = 1


CPU = Device(1.2e10, 1.2e11, 3e-5, compile_s=2.5, horizon_s=300.0, fills_blocks=True)
"""What our float32 steps reach on two cores of an AMD EPYC, all emulated devices together.

Such a server is for a first look and for tests: a shape has five minutes to earn its few seconds back.
"""

CPU_NATIVE = Device(2e10, 2.5e11, 3e-5, compile_s=2.5, horizon_s=300.0)
"""The same for steps of the native kernels, which read bfloat16 and compute only rows that are there."""

CPUS = {"cpu": CPU, "cpu_native": CPU_NATIVE}
"""By the name of a table of kernels."""

_TPU = partial(Device, block_s=1e-6, compile_s=15.0, horizon_s=3600.0, least_singles=2)
TPUS = {
    "v5e": _TPU(8.19e11, 1.97e14),
    "v5p": _TPU(2.765e12, 4.59e14),
    "v6e": _TPU(1.64e12, 9.18e14),
    "7x": _TPU(3.69e12, 1.153e15),
}
"""Memory bandwidth and bfloat16 peak as Google publishes them for each generation; a 7x chip is two devices.

A step of a whole model compiles in about a minute, four of them at a time. XLA turns the products of a single row into
others, with six operations more in a layer than for two rows.
"""


@dataclass(frozen=True)
class StepCost:
    """How long the steps of one model take, per data rank.

    The longer of reading weights and of multiplying, then what attention blocks cost. Padding meets all dense weights,
    and the head where it is a single token; experts compute it only where they fill blocks. Keys and values are left
    out: reading them takes as long in every shape.

    Weights are numbers of elements over all layers: `dense_weights` meet every token, `head_weights` single tokens,
    `expert_weights` are those of one expert. They take `itemsize` bytes, those of experts `expert_itemsize`.
    `tensor_size` devices share the tokens of a data rank, and all `data_size` ranks share the experts.
    """

    device: Device
    num_layers: int
    dense_weights: float
    head_weights: float
    expert_weights: float
    num_experts: int
    top_k: int
    itemsize: int
    expert_itemsize: int
    tensor_size: int = 1
    data_size: int = 1

    def decode_seconds(self, real: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Steps of nothing but single tokens, counted in tokens."""
        return self._seconds(real, num_tokens=size, num_blocks=size, num_singles=size)

    def prefill_seconds(self, *, num_singles: int, block_tokens: int) -> Seconds:
        """Steps counted in full prefill blocks, in shapes that also hold `num_singles` single tokens."""

        def seconds(real: np.ndarray, size: np.ndarray) -> np.ndarray:
            return self._seconds(
                real * block_tokens,
                num_tokens=num_singles + size * block_tokens,
                num_blocks=num_singles + size,
                num_singles=np.asarray(num_singles),
            )

        return seconds

    def _seconds(
        self, num_real: np.ndarray, *, num_tokens: np.ndarray, num_blocks: np.ndarray, num_singles: np.ndarray
    ) -> np.ndarray:
        chance = self.top_k / self.num_experts
        local_experts = self.num_experts / (self.data_size * self.tensor_size)
        num_touched = local_experts * (1 - (1 - chance) ** (num_real * self.data_size))
        expert_rows = num_real * self.top_k / self.tensor_size
        if self.device.fills_blocks:
            block_rows = num_tokens * self.data_size * chance
            # Where an expert needs several blocks, the last one is half full on average.
            expert_rows = np.maximum(num_touched * block_rows, expert_rows + num_touched * block_rows / 2)
        dense, head = self.dense_weights / self.tensor_size, self.head_weights / self.tensor_size
        products = num_tokens * dense + num_singles * head + expert_rows * self.expert_weights
        num_bytes = (dense + head / self.data_size) * self.itemsize
        num_bytes = num_bytes + num_touched * self.expert_weights * self.expert_itemsize
        reading, multiplying = num_bytes / self.device.bytes_per_s, 2 * products / self.device.flops
        return np.maximum(reading, multiplying) + num_blocks * self.num_layers * self.device.block_s


SMALL_MODEL = StepCost(
    CPU,
    8,
    dense_weights=5.4e6,
    head_weights=4.2e6,
    expert_weights=3.1e6,
    num_experts=32,
    top_k=4,
    itemsize=4,
    expert_itemsize=4,
)
"""The `small` synthetic checkpoint on a CPU: stands in where no model is at hand."""


def choose_sizes(
    largest: int,
    *,
    seconds: Seconds,
    compile_s: float,
    horizon_s: float,
    candidates: Sequence[int] = (),
) -> tuple[int, ...]:
    """The sizes to compile for steps of 1 to `largest` items, ascending; the last of them is `largest`.

    A step runs in the smallest size that holds it. Its number of items is log-uniform: as likely from 1 to 2 as from 2
    to 4. Chosen from `candidates` (round numbers where there are none) so that what padding costs in as many steps as
    take `horizon_s` seconds without it, plus `compile_s` for every size, is the least; among equals the fewest sizes.
    """
    real = np.arange(1, largest + 1)
    chances, unpadded = np.log1p(1 / real), seconds(real, real)
    num_steps = horizon_s / float(chances @ unpadded) * chances
    sizes = sorted({size for size in candidates or round_sizes(largest) if size < largest} | {largest})
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for size in sizes:
        lost = num_steps[:size] * (seconds(real[:size], np.asarray(size)) - unpadded[:size])
        # lost_above[n]: what the steps of more than n items lose in this size.
        lost_above = np.append(np.cumsum(lost[::-1])[::-1], 0.0)
        best[size] = min(
            (total + float(lost_above[below]) + compile_s, count + 1, (*chosen, size))
            for below, (total, count, chosen) in best.items()
        )
    return best[largest][2]


def round_sizes(largest: int) -> list[int]:
    """Numbers below `largest` of at most ROUND_BITS significant bits, then `largest`: 1 to 8, 10, 12, 14, 16, 20, ...

    Neighbours are a quarter apart at most. Small changes of the costs leave the choice as it is, and with it what is
    kept on disk.
    """
    return [n for n in range(1, largest) if n % (1 << max(0, n.bit_length() - ROUND_BITS)) == 0] + [largest]
