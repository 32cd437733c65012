"""Which step shapes are compiled, and which of them a plan runs in."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.config.settings import SchedulerSettings
from rayserve_moe.execution.shape_choice import CPUS, SMALL_MODEL, TPUS, Device, StepCost, choose_sizes
from rayserve_moe.execution.step_types import StepShape
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.transformer import ModelConfig
from rayserve_moe.scheduling.inspection import TokenInspection
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS, StepPlan

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
