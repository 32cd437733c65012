"""Layers of the decoder: attention and what comes after it, each with its norm and residual."""

# T tokens   X tokens in prefill blocks   D model width   L layers   M MoE layers

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.balanced_layer import StepCapacity
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.layer import LayerRouting, apply_experts
from rayserve_moe.experts.routing import ForcedExperts, router_of_layer
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.attention_layer import AttentionInputs, DescribedSingles, TokenBatch
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.table import Kernels
from rayserve_moe.kernels.tpu.top_experts import StackedRouter
from rayserve_moe.model.attention import attention_config, rope_frequencies, rotary_width
from rayserve_moe.model.layer_runs import LayerRun
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.sharding import ParallelPlan

EXPERT_ARRAYS = (
    *("gate_MPDF", "up_MPDF", "down_MPFD"),
    *("gate_bias_MPF", "up_bias_MPF", "down_bias_MPD"),
    *("gate_scale_MPZF", "up_scale_MPZF", "down_scale_MPZD"),
)
"""In the order of `ExpertWeights`."""

Parameters = dict[str, dict[str, jax.Array]]
Rows = tuple[jax.Array, jax.Array]
"""Rows of tokens [T, D], and the pool."""


@dataclass(frozen=True)
class ModelConfig:
    """All that is fixed when a step is compiled: the model, and its experts with their kernels and their mesh."""

    spec: ModelSpec
    experts: ExpertConfig

    @property
    def kernels(self) -> Kernels:
        return self.experts.kernels

    @property
    def plan(self) -> ParallelPlan:
        return self.experts.plan


class StepInputs(NamedTuple):
    """What all layers of a step share: tokens, which of them are none of padding, rotary angles, what is derived of
    single tokens for their attention, the slots of the experts, what routing is forced [M, X, K], and the capacity of
    slots where that is limited."""

    batch: TokenBatch
    valid_T: jax.Array
    rotation: Rotation
    singles: DescribedSingles | None
    maps: PlacementArrays | None
    forced: tuple[jax.Array, jax.Array] | None
    capacity: StepCapacity | None


class LayerCarry(NamedTuple):
    """What a layer leaves to the next one: the stream, what is to be added to it (with the next norm, which on a TPU is
    one operation), the pool, and how many layers of the run are done.

    The number is carried and not scanned over, which would be an operation in every layer.
    """

    hidden_TD: jax.Array
    added_TD: jax.Array
    kv_pages: jax.Array
    num_done: jax.Array


def first_carry(hidden_TD: jax.Array, kv_pages: jax.Array) -> LayerCarry:
    """What enters a first layer."""
    return LayerCarry(hidden_TD, jnp.zeros_like(hidden_TD), kv_pages, jnp.int32(0))


def moe_layer(
    params: Parameters, carry: LayerCarry, *, run: LayerRun, inputs: StepInputs, config: ModelConfig
) -> tuple[LayerCarry, LayerRouting]:
    """A layer with experts, the next one of its run, and its routing."""
    layer, moe_index = run.first + carry.num_done, run.first_of_kind + carry.num_done
    hidden_TD, normed_TD, kv_pages = attention_block(params, carry, layer, inputs=inputs, config=config)
    experts = params["experts"]
    flat = ExpertWeights._make(_flatten(experts[name]) if name in experts else None for name in EXPERT_ARRAYS)
    out_TD, routing = apply_experts(
        normed_TD,
        router_of_layer(_stacked_router(experts, moe_index)),
        flat,
        layer=moe_index,
        valid_T=inputs.valid_T,
        config=config.experts,
        maps=inputs.maps,
        forced=_forced_of_layer(inputs, moe_index),
        capacity=inputs.capacity,
    )
    if config.spec.experts.shared != "none":
        shared_TD = _shared_expert(params["shared"], normed_TD, moe_index, config)
        out_TD = (out_TD.astype(jnp.float32) + shared_TD).astype(hidden_TD.dtype)
    added_TD = scaled(out_TD, config.spec.factors.residual_multiplier)
    return LayerCarry(hidden_TD, added_TD, kv_pages, carry.num_done + 1), routing


@jax.named_scope("shared_expert")
def _shared_expert(
    weights: dict[str, jax.Array], normed_TD: jax.Array, moe_layer: jax.Array, config: ModelConfig
) -> jax.Array:
    """What the shared expert adds to every token: float32 [T, D], times its gate where it has one (Qwen2-MoE)."""
    matrices = weights["gate_MDS"], weights["up_MDS"], weights["down_MSD"]
    out_TD = config.plan.sum_over_tensor(config.kernels.mlp(normed_TD, matrices, layer=moe_layer))
    if config.spec.experts.shared != "sigmoid_gated":
        return out_TD
    gate_D1 = weights["out_gate_MD1"][moe_layer].astype(jnp.float32)
    return config.kernels.experts.router_scores(normed_TD, gate_D1, score="sigmoid") * out_TD


def dense_layer(
    params: Parameters, carry: LayerCarry, *, run: LayerRun, inputs: StepInputs, config: ModelConfig
) -> tuple[LayerCarry, None]:
    """A layer without experts, the next one of its run."""
    layer, dense_index = run.first + carry.num_done, run.first_of_kind + carry.num_done
    hidden_TD, normed_TD, kv_pages = attention_block(params, carry, layer, inputs=inputs, config=config)
    out_TD = dense_mlp(params["dense"], normed_TD, dense_index, config)
    added_TD = scaled(out_TD.astype(hidden_TD.dtype), config.spec.factors.residual_multiplier)
    return LayerCarry(hidden_TD, added_TD, kv_pages, carry.num_done + 1), None


@jax.named_scope("dense_mlp")
def dense_mlp(
    weights: dict[str, jax.Array], normed_TD: jax.Array, dense_index: jax.Array, config: ModelConfig
) -> jax.Array:
    """What the MLP of a layer without experts adds to every token: float32 [T, D]."""
    matrices = weights["gate_NDI"], weights["up_NDI"], weights["down_NID"]
    return config.plan.sum_over_tensor(config.kernels.mlp(normed_TD, matrices, layer=dense_index))


def attention_block(
    params: Parameters, carry: LayerCarry, layer: jax.Array, *, inputs: StepInputs, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention with its norm and residual; returns the stream, the stream normed for the MLP, and the pool."""
    (hidden_TD, added_TD, kv_pages, _), weights = carry, params["attention"]
    projected, at_once = None, config.kernels.attention.norm_and_project
    if at_once is not None:
        attention, stacked = attention_config(config.spec, config.plan), StackedWeights(weights, layer)
        with jax.named_scope("attention/projections"):
            projected = at_once(hidden_TD, added_TD, stacked, rotation=inputs.rotation, config=attention)
    if projected is None:
        hidden_TD, normed_TD = _add_and_norm(hidden_TD, added_TD, weights["norm_LD"], layer, config)
        out_TD, kv_pages = attend(weights, (normed_TD, kv_pages), layer, inputs=inputs, config=config)
    else:
        hidden_TD, made = projected[0], projected[1:]
        out_TD, kv_pages = attend(weights, (hidden_TD, kv_pages), layer, inputs=inputs, config=config, made=made)
    added_TD = scaled(out_TD, config.spec.factors.residual_multiplier)
    return *_add_and_norm(hidden_TD, added_TD, params["mlp_norm"]["scale"], layer, config), kv_pages


@jax.named_scope("attention")
def attend(
    weights: dict[str, jax.Array],
    rows: Rows,
    layer: jax.Array,
    *,
    inputs: StepInputs,
    config: ModelConfig,
    made: Rows | None = None,
) -> Rows:
    """What attention adds to the stream, of the normed one [T, D], and the pool; of that one only the shape counts
    where queries and rows are `made` already."""
    normed_TD, kv_pages = rows
    of_layer = AttentionInputs(weights, inputs.batch, inputs.rotation, layer, inputs.singles, made)
    attention = attention_config(config.spec, config.plan)
    out_TD, kv_pages = config.kernels.attention.attend(normed_TD, kv_pages, of_layer, config=attention)
    out_TD = config.plan.sum_over_tensor(out_TD).astype(normed_TD.dtype)
    return out_TD + weights["o_bias_LD"][layer] if "o_bias_LD" in weights else out_TD, kv_pages


def scaled(hidden_TD: jax.Array, factor: float) -> jax.Array:
    """Multiply in float32, and nothing by one."""
    return hidden_TD if factor == 1.0 else (hidden_TD.astype(jnp.float32) * factor).astype(hidden_TD.dtype)


def _add_and_norm(
    hidden_TD: jax.Array, added_TD: jax.Array, scale_LD: jax.Array, layer: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """The stream with what is added, and its norm: at once by a kernel that can."""
    at_once = config.kernels.add_norm
    if at_once is not None:
        with jax.named_scope("norm"):
            made = at_once(hidden_TD, added_TD, scale_LD, layer=layer, eps=config.spec.norm_eps)
        if made is not None:
            return made
    hidden_TD = hidden_TD + added_TD
    return hidden_TD, norm_rows(hidden_TD, scale_LD[layer], config)


def norm_rows(hidden_TD: jax.Array, scale_D: jax.Array, config: ModelConfig) -> jax.Array:
    """The RMS norm of a model."""
    with jax.named_scope("norm"):
        return config.kernels.norm(hidden_TD, scale_D, config.spec.norm_eps)


def _forced_of_layer(inputs: StepInputs, moe_layer: jax.Array) -> ForcedExperts | None:
    if inputs.forced is None:
        return None
    forced_MXK, is_any = inputs.forced
    return ForcedExperts(forced_MXK[moe_layer].astype(jnp.int32), is_any)


def _stacked_router(experts: dict[str, jax.Array], layer: jax.Array) -> StackedRouter:
    return StackedRouter(experts["router_MDE"], experts.get("router_bias_ME"), experts.get("selection_bias_ME"), layer)


def _flatten(weights: jax.Array) -> jax.Array:
    """View [layers, slots, ...] as [layers * slots, ...]."""
    return weights.reshape(-1, *weights.shape[2:])


def step_inputs(batch: TokenBatch, kv_pages: jax.Array, config: ModelConfig) -> StepInputs:
    """What follows from the tokens of a step and the shape of a pool, with experts in their own slots."""
    singles = _describe_singles(batch, kv_pages, config)
    return StepInputs(batch, batch.valid_T, _rotation(batch, config), singles, None, None, None)


def _rotation(batch: TokenBatch, config: ModelConfig) -> Rotation:
    rope = config.spec.rope
    with jax.named_scope("rotation"):
        frequencies = rope_frequencies(rope, rotary_width(config.spec))
        factor = rope.yarn.attention_factor if rope.yarn else 1.0
        return config.kernels.rotation(batch.positions_T, frequencies, factor=factor)


def _describe_singles(batch: TokenBatch, kv_pages: jax.Array, config: ModelConfig) -> DescribedSingles | None:
    describe, num_singles = config.kernels.attention.describe_singles, batch.num_singles
    if describe is None or not num_singles:
        return None
    page_size, table_width = kv_pages.shape[1], batch.page_table_BP.shape[-1]
    with jax.named_scope("attention/paged_attention"):
        windows = config.spec.attention.windows or (0,)
        positions_U = batch.positions_T[:num_singles]
        by_window = describe(
            positions_U,
            page_size=page_size,
            table_width=table_width,
            windows=windows,
            ancestors_U=batch.ancestors_U,
            together=batch.together,
        )
        return DescribedSingles(by_window, batch.valid_T[:, None])
