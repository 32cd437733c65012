"""Choice of the step shapes to compile, and of the shape for a plan.

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
from rayserve_moe.execution.step.pytrees import StepShape
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS, AdapterWork, Chunks, StepPlan
from rayserve_moe.scheduling.token_probe import NO_ID, TokenProbe

Seconds = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Returns the seconds of a step with `real` items in a shape of size `size`, elementwise and broadcast."""

ROUND_BITS = 3


@dataclass(frozen=True)
class Device:
    """Throughput of a device, and the cost of an additional compiled shape."""

    bytes_per_s: float
    """Memory bandwidth."""
    flops: float
    """Floating-point operations per second."""
    block_s: float
    """Seconds of an attention block in a layer, padding or not."""
    compile_s: float
    """Seconds that another shape adds to the start while others compile in parallel."""
    horizon_s: float
    """Seconds of steps within which a shape has to save its `compile_s`."""
    fills_blocks: bool = False
    """True if experts compute whole blocks of rows, each as large as the mean load of an expert in a full step."""
    min_singles: int = 1
    """Minimum number of single tokens of a step, padding included."""


CPU = Device(1.2e10, 1.2e11, 3e-5, compile_s=2.5, horizon_s=300.0, fills_blocks=True)
"""Measured throughput of float32 steps on two cores of an AMD EPYC, the sum of all emulated devices.

Such a server is for trials and tests, so a shape has to save its compile time within five minutes.
"""

CPU_NATIVE = Device(2e10, 2.5e11, 3e-5, compile_s=2.5, horizon_s=300.0)
"""The same for steps of the native kernels, which read bfloat16 and compute no padding rows."""

CPUS = {"cpu": CPU, "cpu_invariant": CPU, "cpu_native": CPU_NATIVE}
"""CPU devices by the name of their kernel table."""

_TPU = partial(Device, block_s=1e-6, compile_s=15.0, horizon_s=3600.0, min_singles=2)
TPUS = {
    "v5e": _TPU(8.19e11, 1.97e14),
    "v5p": _TPU(2.765e12, 4.59e14),
    "v6e": _TPU(1.64e12, 9.18e14),
    "7x": _TPU(3.69e12, 1.153e15),
}
"""Memory bandwidth and bfloat16 peak as published by Google for each generation; a 7x chip is two devices.

A step of a whole model compiles in about a minute, four steps at a time. For a single row XLA rewrites the matrix
products, with six more operations in a layer than for two rows.
"""

_GPU = partial(Device, block_s=1e-6, compile_s=8.0, horizon_s=3600.0, min_singles=16)
GPUS = {"H100": _GPU(3.35e12, 9.89e14), "H200": _GPU(4.8e12, 9.89e14)}
"""Memory bandwidth and dense bfloat16 peak as published by NVIDIA for the SXM cards, by a part of jax's device kind.

A product takes 16 rows or more. For a single row XLA writes sums instead of products, and computes them again inside
other kernels.
"""


@dataclass(frozen=True)
class StepCost:
    """Cost model for the steps of a model, per data rank.

    A step takes the maximum of the seconds of reading weights and of multiplying, plus the seconds of its attention
    blocks. Padding is multiplied with all dense weights, and single-token padding with the head. Experts compute
    padding only if the device `fills_blocks`. Keys and values are left out, because reading them takes equally long in
    every shape. Weights are numbers of elements over all layers.
    """

    device: Device
    num_layers: int
    dense_weights: float
    """Weights that every token is multiplied with."""
    head_weights: float
    """Weights that only single tokens are multiplied with."""
    expert_weights: float
    """Weights of an expert."""
    num_experts: int
    top_k: int
    itemsize: int
    """Bytes of a weight outside experts."""
    expert_itemsize: int
    """Bytes of an expert weight."""
    tensor_size: int = 1
    """Devices that share the tokens of a data rank."""
    data_size: int = 1
    """Data ranks, which share the experts."""

    def decode_seconds(self, real: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Return the seconds of steps of single tokens only, whose items are tokens."""
        return self._seconds(real, num_tokens=size, num_blocks=size, num_singles=size)

    def prefill_seconds(self, *, num_singles: int, block_tokens: int) -> Seconds:
        """Return the cost function of steps in full prefill blocks, for shapes with `num_singles` single tokens."""

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
            # The last of several blocks of an expert is half full on average.
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
"""Cost of the `small` synthetic checkpoint on a CPU, the default without a model."""


def choose_sizes(
    largest: int,
    *,
    seconds: Seconds,
    compile_s: float,
    horizon_s: float,
    candidates: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the sizes to compile for steps of 1 to `largest` items, ascending; the last size is `largest`.

    A step runs in the smallest size that holds it. Its number of items is log-uniform: 1 to 2 is as likely as 2 to 4.
    The sizes come from `candidates`, or from `round_sizes` if that is empty. They minimize the seconds of padding plus
    `compile_s` per size, over the number of steps that take `horizon_s` seconds without padding. Ties go to fewer
    sizes.
    """
    real = np.arange(1, largest + 1)
    chances, unpadded = np.log1p(1 / real), seconds(real, real)
    num_steps = horizon_s / float(chances @ unpadded) * chances
    sizes = sorted({size for size in candidates or round_sizes(largest) if size < largest} | {largest})
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    for size in sizes:
        lost = num_steps[:size] * (seconds(real[:size], np.asarray(size)) - unpadded[:size])
        # lost_above[n]: seconds that steps of more than n items lose in this size
        lost_above = np.append(np.cumsum(lost[::-1])[::-1], 0.0)
        best[size] = min(
            (total + float(lost_above[below]) + compile_s, count + 1, (*chosen, size))
            for below, (total, count, chosen) in best.items()
        )
    return best[largest][2]


def round_sizes(largest: int) -> list[int]:
    """Return 1 to 8, 10, 12, 14, 16, 20, ...: numbers with ROUND_BITS significant bits below `largest`, then `largest`.

    From 4 on, neighbours differ by at most a quarter. With such coarse candidates small changes of the costs keep the
    chosen sizes, and so the programs on disk stay valid.
    """
    return [n for n in range(1, largest) if n % (1 << max(0, n.bit_length() - ROUND_BITS)) == 0] + [largest]


PREFILL_SHARE = 0.25
"""Share of time in steps with prompts."""

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
    """Return all shapes to compile by `cost`, smallest first.

    Decode-only shapes come first. The largest holds every row, unless the settings list the sizes; on a TPU each has at
    least two rows, on a GPU 16. Further decode-only shapes for drafts reach up to `verify_rows`, each at most twice the
    previous. Then follow mixed shapes with every row as a single token beside prefill blocks, up to the token budget of
    a step.
    """
    rows, block, device = scheduler.max_running_requests, PREFILL_BLOCK_TOKENS, cost.device
    decode_sizes = scheduler.decode_batch_sizes or choose_sizes(
        rows,
        seconds=cost.decode_seconds,
        compile_s=device.compile_s,
        horizon_s=device.horizon_s * (1 - PREFILL_SHARE),
    )
    decode_sizes = [max(size, device.min_singles) for size in decode_sizes]
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


FIRST_TOKEN = TokenProbe(
    np.zeros(1, np.intp), np.zeros(1, np.int32), np.full((1, 0), NO_ID, np.int32), columns=("hidden", "logprobs")
)


def filling_plan(shape: StepShape, *, max_model_len: int, num_rows: int, is_probed: bool = False) -> StepPlan:
    """Return a plan that needs exactly this shape: a chunk per prefill block, or single tokens of up to all rows.

    Single tokens after the first are padding: rows without a sequence share the null page, and a kernel that writes
    rows itself must not receive two tokens of the same page. If `is_probed`, the plan probes its first token.
    """
    blocks = [min(shape.block_tokens, max_model_len)] * shape.num_blocks
    lengths = np.asarray(blocks or [1] * min(shape.num_singles, num_rows), np.int32)
    is_first = np.arange(len(lengths)) == 0
    return StepPlan(
        step_id=-1,
        chunks=Chunks(
            np.arange(len(lengths), dtype=np.int32) % num_rows,
            starts=np.where(is_first | bool(blocks), 0, -1).astype(np.int32),
            lengths=lengths,
            token_ids=np.zeros(int(lengths.sum()), np.int32),
            samples=is_first,
        ),
        wants_routing=True,
        probe=FIRST_TOKEN if is_probed else None,
        adapters=AdapterWork(np.full(len(lengths), -1, np.int32)) if shape.num_adapters else None,
    )


def step_cost(config: ModelConfig, *, dtype: str) -> StepCost:
    """Return the cost of a model's steps on its devices."""
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
    """Return the throughput of a device.

    Emulated devices share the CPU of their kernel table. Unknown TPUs count as v5e, unknown GPUs as H100.
    """
    if device.platform == "cpu":
        cpu = CPUS[kernels]
        return replace(cpu, bytes_per_s=cpu.bytes_per_s / num_devices, flops=cpu.flops / num_devices)
    if device.platform == "gpu":
        return next((gpu for name, gpu in GPUS.items() if name in device.device_kind), GPUS["H100"])
    return TPUS[TPU_OF_KIND.get(device.device_kind, "v5e")]
