"""Chooses the step shapes to compile, and the one that a plan runs in.

The choice weighs seconds lost to padding against seconds spent on compiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.config.settings import SchedulerSettings
from rayserve_moe.execution.step_types import StepShape
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.transformer import ModelConfig
from rayserve_moe.scheduling.inspection import TokenInspection
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS, StepPlan

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


PREFILL_SHARE = 0.25
"""Part of the time that goes to steps with prompts in them."""

TPU_OF_KIND = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
}


def step_shapes(
    scheduler: SchedulerSettings, cost: StepCost = SMALL_MODEL, *, verify_rows: int = 0
) -> tuple[StepShape, ...]:
    """All shapes to compile, smallest first: those that are worth it by `cost`.

    Decode-only shapes up to one that holds every row (on a TPU at least two), or as the settings list them, and beyond
    up to `verify_rows` for drafts, each twice the one before at most; then mixed shapes, which hold every row as a
    single token beside prefill blocks, up to the step's budget.
    """
    rows, block, device = scheduler.max_running_requests, PREFILL_BLOCK_TOKENS, cost.device
    decode_sizes = scheduler.decode_batch_sizes or choose_sizes(
        rows,
        seconds=cost.decode_seconds,
        compile_s=device.compile_s,
        horizon_s=device.horizon_s * (1 - PREFILL_SHARE),
    )
    decode_sizes = [max(size, device.least_singles) for size in decode_sizes]
    num_singles = max(decode_sizes)
    prefill_sizes = choose_sizes(
        -(-scheduler.max_step_tokens // block),
        seconds=cost.prefill_seconds(num_singles=num_singles, block_tokens=block),
        compile_s=device.compile_s,
        horizon_s=device.horizon_s * PREFILL_SHARE,
    )
    verify_sizes = {verify_rows >> i for i in range(8) if verify_rows >> i > num_singles}
    decode = [StepShape(size, 0, block) for size in sorted({*decode_sizes, *verify_sizes})]
    return (*decode, *(StepShape(num_singles, size, block) for size in prefill_sizes))


FIRST_TOKEN = TokenInspection(np.zeros(1, np.intp), np.zeros((1, 1), np.int32))


def choose_shape(shapes: tuple[StepShape, ...], *, num_singles: int, num_blocks: int) -> StepShape:
    """Take the shape with the fewest tokens that holds the plan; the scheduler never plans more than the largest."""
    fitting = [s for s in shapes if s.num_singles >= num_singles and s.num_blocks >= num_blocks]
    assert fitting, f"no compiled shape holds {num_singles} single tokens and {num_blocks} prefill blocks"
    return min(fitting, key=lambda s: s.num_tokens)


def filling_plan(shape: StepShape, *, longest: int, num_rows: int, is_inspected: bool = False) -> StepPlan:
    """A plan that needs exactly this shape: a chunk for every prefill block, else single tokens of all rows at most.

    Of single tokens all but the first are padding: rows without a sequence share the null page, and a kernel that
    writes rows itself may not be given two tokens of one page. Where it `is_inspected` its first token is looked at."""
    blocks = [min(shape.block_tokens, longest)] * shape.num_blocks
    lengths = np.asarray(blocks or [1] * min(shape.num_singles, num_rows), np.int32)
    is_first = np.arange(len(lengths)) == 0
    return StepPlan(
        step_id=-1,
        chunk_rows=np.arange(len(lengths), dtype=np.int32) % num_rows,
        chunk_starts=np.where(is_first | bool(blocks), 0, -1).astype(np.int32),
        chunk_lengths=lengths,
        token_ids=np.zeros(int(lengths.sum()), np.int32),
        chunk_samples=is_first,
        wants_routing=True,
        inspection=FIRST_TOKEN if is_inspected else None,
    )


def step_cost(config: ModelConfig, *, dtype: str) -> StepCost:
    """What steps of a model cost on the devices it lies on."""
    spec, plan = config.spec, config.plan
    tree = parameter_specs(spec, dtype=dtype)
    params = [param for group in tree.keys() - {"embedding", "mlp_norm"} for param in tree[group].values()]
    of_slots, of_all = (
        sum(math.prod(param.shape) for param in params if bool(param.num_experts) == in_slots)
        for in_slots in (True, False)
    )
    return StepCost(
        device_of(plan.mesh.devices.flat[0], num_devices=plan.mesh.size, kernels=config.kernels.name),
        spec.num_layers,
        dense_weights=of_all,
        head_weights=spec.vocab_size * spec.hidden_size,
        expert_weights=of_slots / spec.router.num_experts,
        num_experts=spec.router.num_experts,
        top_k=spec.router.top_k,
        itemsize=jnp.dtype(dtype).itemsize,
        expert_itemsize=jnp.dtype(config.experts.weight_dtype or dtype).itemsize,
        tensor_size=plan.tensor_size,
        data_size=plan.data_size,
    )


def device_of(device: jax.Device, *, num_devices: int, kernels: str = "cpu") -> Device:
    """What a device can do: a CPU by its table of kernels, shared by emulated devices; unknown TPUs count as v5e."""
    if device.platform == "cpu":
        cpu = CPUS[kernels]
        return replace(cpu, bytes_per_s=cpu.bytes_per_s / num_devices, flops=cpu.flops / num_devices)
    return TPUS[TPU_OF_KIND.get(device.device_kind, "v5e")]
