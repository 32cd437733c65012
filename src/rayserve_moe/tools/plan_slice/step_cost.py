"""The time of a step without compiling it: the work of its roofline, the bytes of its exchange, and a price per op.

    max(operations / peak, HBM bytes / bandwidth) + link bytes over the narrowest cut + ops x overhead

Passes and counts of ops come from steps that libtpu compiled (`benchmarks/results/step_estimate.json`); nothing was
measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from rayserve_moe.execution.weights.placing import parameter_tree
from rayserve_moe.experts.backends import choose_backend
from rayserve_moe.experts.tokens import chunk_tokens
from rayserve_moe.kernels.tpu.pushed_sizes import PushSizes, lacks, usable_bytes
from rayserve_moe.model.kv_cache import cache_row, windows_of
from rayserve_moe.model.transformer import ModelConfig
from rayserve_moe.tools.estimate.chips import OVERHEAD_S, Chip, chip_of
from rayserve_moe.tools.estimate.links import Slice
from rayserve_moe.tools.estimate.workload import StepSizes, step_work

PUSHED = "pushed"
LAYER_OPS, SHARED_LAYER_OPS, PUSH_OPS, GATHER_OPS, SEND_OPS, CHUNK_OPS, REST_OPS = 4, 23, 4, 26, 44, 74, 96
"""Ops of a layer apart from its exchange, and apart from one that is no kernel where cores share a device; of an
exchange by a kernel, of one that gathers, of one that sends rows at once and of every chunk of one that sends many;
of the rest of a step.
"""
PUSH_PASSES, DECODE_PASSES, PREFILL_PASSES = 8, 16, 11
"""How often a step's ops read or write the rows that experts take: in a kernel, in one chunk of few rows, and in chunks
of many."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step on one device, by what they go to; `backend` is how tokens reach experts."""

    flops_s: float
    hbm_s: float
    link_s: float
    ops_s: float
    backend: str

    @property
    def seconds(self) -> float:
        """Ops, and links apart from those that a kernel uses, are taken not to overlap with the rest."""
        if self.backend == PUSHED:
            return max(self.flops_s, self.hbm_s, self.link_s) + self.ops_s
        return max(self.flops_s, self.hbm_s) + self.link_s + self.ops_s


@dataclass(frozen=True)
class StepTokens:
    """What a data rank has in a step: sequences that decode, each with `context` tokens, and prompt tokens."""

    sequences: int
    context: int
    prompt: int = 0


def step_cost(
    model: ModelConfig, tokens: StepTokens, *, topology: str, kv_dtype: str = "bfloat16", imbalance: float = 1.0
) -> StepCost:
    """The cost of a step of bfloat16 weights, experts as the model has them.

    The hottest rank has `imbalance` times the mean of expert rows.
    """
    chip, spec, plan = chip_of(topology), model.spec, model.plan
    sizes = StepSizes(topology, tokens.sequences, tokens.context, kv_dtype=kv_dtype)
    work = step_work(model, sizes, prompt_tokens=tokens.prompt)
    row_bytes = spec.hidden_size * jnp.dtype(sizes.dtype).itemsize
    per_device = math.ceil((tokens.sequences + tokens.prompt) / plan.tensor_size)
    backend = _backend_for(model, per_device, chip=chip)
    exchanges, num_layers = backend in (PUSHED, "all_to_all", "fused"), len(spec.moe_layer_ids)
    chunk = chunk_tokens(per_device, top_k=spec.router.top_k, row_bytes=row_bytes, overlapped=backend == "fused")
    num_chunks = math.ceil(per_device / chunk) if exchanges and backend != PUSHED else 1
    expert_bytes = _expert_elements(model, sizes.dtype) * 2 * work.used_slots / model.experts.num_local_slots
    passes = PREFILL_PASSES if num_chunks > 1 else PUSH_PASSES if backend == PUSHED else DECODE_PASSES
    moved = work.expert_rows * imbalance * row_bytes * passes * num_layers
    hbm_bytes = work.hbm_bytes - _unseen_bytes(model, tokens, kv_dtype) + (num_chunks - 1) * expert_bytes + moved
    expert_flops = 2 * work.expert_rows / model.experts.num_local_slots * _expert_elements(model, sizes.dtype)
    layer_ops = LAYER_OPS if chip.cores_per_device == 1 or backend == PUSHED else SHARED_LAYER_OPS
    num_ops = spec.num_layers * (layer_ops + _exchange_ops(backend, num_chunks)) + REST_OPS
    return StepCost(
        (work.flops + (imbalance - 1) * expert_flops) / chip.device_flops,
        hbm_bytes / chip.device_hbm_bytes,
        link_seconds(model, tokens, topology=topology, exchanges=exchanges, imbalance=imbalance),
        num_ops * OVERHEAD_S,
        backend,
    )


def _backend_for(model: ModelConfig, tokens: int, *, chip: Chip) -> str:
    """How tokens of a device reach experts with `expert_backend: auto` (see `experts.layer.backend_for`)."""
    spec, plan = model.spec, model.plan
    sizes = PushSizes(
        tokens,
        spec.router.top_k,
        spec.hidden_size,
        spec.experts.intermediate_size,
        model.experts.num_local_slots,
        tuple(plan.mesh.shape.items()),
        weight_dtype=model.experts.weight_dtype or "bfloat16",
        num_cores=chip.cores_per_device,
        in_blocks=bool(model.experts.weight_dtype) and spec.block_dtype == model.experts.weight_dtype,
    )
    core_bytes = usable_bytes(chip.core_vmem)
    if plan.num_expert_ranks > 1 and not spec.experts.bias and not lacks(sizes, core_bytes=core_bytes):
        return PUSHED
    return choose_backend(
        tokens,
        ep_size=plan.num_expert_ranks,
        tensor_size=plan.tensor_size,
        platform="tpu",
        top_k=spec.router.top_k,
        row_bytes=spec.hidden_size * 2,
    )


def _exchange_ops(backend: str, num_chunks: int) -> int:
    """Ops of a layer's exchange, experts included."""
    if num_chunks > 1:
        return CHUNK_OPS * num_chunks
    return {PUSHED: PUSH_OPS, "all_to_all": SEND_OPS, "fused": SEND_OPS}.get(backend, GATHER_OPS)


def link_seconds(
    model: ModelConfig, tokens: StepTokens, *, topology: str, exchanges: bool, imbalance: float = 1.0
) -> float:
    """Seconds that the collectives of a step take over the narrowest cut of the slice."""
    spec, plan = model.spec, model.plan
    devices, tensor = plan.mesh.devices, plan.tensor_size
    place = Slice(chip_of(topology), tuple(tuple(device.coords) for device in devices.flat))
    numbers = np.arange(devices.size).reshape(devices.shape)
    over_data, over_tensor = numbers.T.tolist(), numbers.tolist()
    everywhere = [numbers.reshape(-1).tolist()]
    rows = tokens.sequences + tokens.prompt
    row_bytes = spec.hidden_size * 2
    if exchanges:
        sent = math.ceil(rows / tensor) * spec.router.top_k * row_bytes
        layer = 2 * imbalance * place.seconds("ragged-all-to-all", sent, groups=everywhere)
        layer += place.seconds("all-gather", math.ceil(rows / tensor) * row_bytes, groups=over_tensor)
    else:
        layer = place.seconds("all-gather", rows * row_bytes, groups=over_data)
        layer += place.seconds("reduce-scatter", rows * plan.data_size * 2 * row_bytes, groups=over_data)
        layer += place.seconds("all-reduce", rows * row_bytes, groups=over_tensor)
    attention = place.seconds("all-reduce", rows * row_bytes, groups=over_tensor)
    return len(spec.moe_layer_ids) * layer + spec.num_layers * attention


def _expert_elements(model: ModelConfig, dtype: str) -> int:
    """Elements of expert weights on a device, all layers."""
    shapes = (
        model.plan.sharding(param.axes).shard_shape(param.shape)
        for specs in parameter_tree(model, dtype=dtype).values()
        for param in specs.values()
        if param.num_experts
    )
    return sum(map(math.prod, shapes))


def _unseen_bytes(model: ModelConfig, tokens: StepTokens, kv_dtype: str) -> float:
    """KV bytes of `step_work` that layers with a window do not read."""
    row = (
        cache_row(
            model.spec, tensor_size=model.plan.tensor_size, is_flat=model.kernels.attention.has_flat_rows
        ).local_size(model.plan)
        * jnp.dtype(kv_dtype).itemsize
    )
    unseen = sum(tokens.context - window for window in windows_of(model.spec, longest=tokens.context) if window)
    return tokens.sequences * unseen * row
