"""The decoder: from token ids to hidden states, with routing ids and expert counts as outputs."""

# T tokens   X tokens in prefill blocks   D model width   L layers   M MoE layers   E experts   K experts per token
# V vocabulary (local share)   S samples of a data rank   W samples of all data ranks

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.balanced_layer import StepCapacity, step_capacity
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.layer import LayerRouting, apply_experts
from rayserve_moe.experts.routing import ForcedExperts, count_tokens, router_of_layer
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.attention_layer import AttentionInputs, DescribedSingles, TokenBatch
from rayserve_moe.kernels.expert_products import ExpertWeights
from rayserve_moe.kernels.layers import Rotation, take_rows
from rayserve_moe.kernels.registry import Kernels
from rayserve_moe.kernels.top_experts import StackedRouter
from rayserve_moe.model.attention import attention_config, rope_frequencies, rotary_width
from rayserve_moe.model.layer_runs import LayerRun, layer_runs
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.vocabulary import look_up, score_my_words
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.parallel.vocabulary_part import VocabularyPart, vocabulary_part

EXPERT_ARRAYS = (
    *("gate_MPDF", "up_MPDF", "down_MPFD"),
    *("gate_bias_MPF", "up_bias_MPF", "down_bias_MPD"),
    *("gate_scale_MPZF", "up_scale_MPZF", "down_scale_MPZD"),
)
"""In the order of `ExpertWeights`."""

Parameters = dict[str, dict[str, jax.Array]]


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


class ForwardOutput(NamedTuple):
    """Hidden states before the final norm [T, D], the updated pool, routing [M, T, K] and counts [M, E].

    Where slots have limited capacity, also the sum of the layers' tallies (`LimitedAssignments`).
    All of this data rank's tokens alone, and the same on every device of its tensor group (but for the pool).
    """

    hidden_TD: jax.Array
    kv_pages: jax.Array
    topk_ids_MTK: jax.Array
    expert_counts_ME: jax.Array
    tally_4: jax.Array | None


class _StepInputs(NamedTuple):
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


class _Carry(NamedTuple):
    """What a layer leaves to the next one: the stream, what is to be added to it (with the next norm, which on a TPU is
    one operation), the pool, and how many layers of the run are done.

    The number is carried and not scanned over, which would be an operation in every layer.
    """

    hidden_TD: jax.Array
    added_TD: jax.Array
    kv_pages: jax.Array
    num_done: jax.Array


def forward(  # noqa: PLR0913 (what differs from call to call is by keyword)
    params: Parameters,
    kv_pages: jax.Array,
    batch: TokenBatch,
    *,
    config: ModelConfig,
    maps: PlacementArrays | None = None,
    forced_MXK: jax.Array | None = None,
    capacity_factor: jax.Array | None = None,
) -> ForwardOutput:
    """Run all layers on one device's share; call it inside the sharded step.

    `params` and `kv_pages` are local shares, `batch` is this data rank's: every rank has one of the same shape,
    padding where it has nothing to do. `maps` say in which slots experts lie, for all MoE layers and the same on every
    device; None stands for expert i in slot i. Routing is captured before any mapping to slots, in router order.
    `forced_MXK` replaces what routers select for the tokens in prefill blocks, where it is not negative; a balanced
    selection ignores it. `capacity_factor` is a float32 where the capacity of slots is limited.
    """
    spec, kernels = config.spec, config.kernels
    take = kernels.tied_rows if spec.tie_embeddings else take_rows
    with jax.named_scope("embedding"):
        hidden_TD = look_up(params["embedding"]["table_VD"], batch.token_ids_T, plan=config.plan, take=take)
        hidden_TD = _scaled(hidden_TD, spec.embedding_multiplier)
    forced = capacity = None
    if forced_MXK is not None and config.experts.selection != "balanced":
        forced = forced_MXK, jnp.any(forced_MXK >= 0)
    if config.experts.limits_capacity:
        assert capacity_factor is not None, "slots with limited capacity need a factor"
        capacity = step_capacity(batch.valid_T, capacity_factor, config=config.experts)
    singles = _describe_singles(batch, kv_pages, config)
    inputs = _StepInputs(batch, batch.valid_T, _rotation(batch, config), singles, maps, forced, capacity)
    captured_runs, carry = [], _Carry(hidden_TD, jnp.zeros_like(hidden_TD), kv_pages, jnp.int32(0))
    for run in layer_runs(spec):
        visit = partial(_moe_layer if run.is_moe else _dense_layer, params, run=run, inputs=inputs, config=config)
        begin = carry._replace(num_done=jnp.int32(0))
        carry, captured = jax.lax.scan(lambda carry, _, visit=visit: visit(carry), begin, length=run.length)
        if captured is not None:
            captured_runs.append(captured)
    hidden_TD, kv_pages = carry.hidden_TD + carry.added_TD, carry.kv_pages
    routing = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *captured_runs)
    with jax.named_scope("routing_capture"):
        # One operation for all layers: in each it would be one of many small ones.
        count = partial(count_tokens, num_experts=config.experts.router.num_experts)
        counts_ME = jax.vmap(count, in_axes=(0, None))(routing.ids_TK, batch.valid_T)
    tally_4 = None if routing.tally_4 is None else jnp.sum(routing.tally_4, axis=0, dtype=jnp.int32)
    return ForwardOutput(hidden_TD, kv_pages, routing.ids_TK, counts_ME, tally_4)


def _rotation(batch: TokenBatch, config: ModelConfig) -> Rotation:
    rope = config.spec.rope
    with jax.named_scope("rotation"):
        frequencies = rope_frequencies(rope, rotary_width(config.spec))
        factor = rope.yarn.attention_factor if rope.yarn else 1.0
        return config.kernels.rotation(batch.positions_T, frequencies, factor=factor)


def _describe_singles(batch: TokenBatch, kv_pages: jax.Array, config: ModelConfig) -> DescribedSingles | None:
    describe, num_singles = config.kernels.describe_singles, batch.num_singles
    if describe is None or not num_singles:
        return None
    page_size, table_width = kv_pages.shape[1], batch.page_table_BP.shape[-1]
    with jax.named_scope("attention/paged_attention"):
        windows = config.spec.attention.windows or (0,)
        positions_U = batch.positions_T[:num_singles]
        by_window = describe(positions_U, page_size=page_size, table_width=table_width, windows=windows)
        return DescribedSingles(by_window, batch.valid_T[:, None])


def words_of(config: ModelConfig) -> VocabularyPart:
    """The words that a device scores."""
    multiple = config.kernels.multiples.get("vocabulary", 1)
    return vocabulary_part(config.plan, num_words=config.spec.vocab_size, multiple=multiple)


def logits_of(params: Parameters, hidden_SD: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Final norm and head: float32 logits [W, V] of the `hidden_SD` of all data ranks, rank after rank, for the words
    of this device (`words_of`)."""
    embedding, kernels = params["embedding"], config.kernels
    normed_SD = _norm(hidden_SD, embedding["final_norm_D"], config)
    head = partial(kernels.head, head_VD=embedding.get("head_VD", embedding["table_VD"]))
    with jax.named_scope("head"):
        logits_WV = score_my_words(normed_SD, head, part=words_of(config), plan=config.plan)
        return logits_WV if config.spec.logits_divisor == 1.0 else logits_WV / config.spec.logits_divisor


def _moe_layer(
    params: Parameters, carry: _Carry, *, run: LayerRun, inputs: _StepInputs, config: ModelConfig
) -> tuple[_Carry, LayerRouting]:
    layer, moe_layer = run.first + carry.num_done, run.first_of_kind + carry.num_done
    hidden_TD, normed_TD, kv_pages = _attention_block(params, carry, layer, inputs=inputs, config=config)
    experts = params["experts"]
    flat = ExpertWeights._make(_flatten(experts[name]) if name in experts else None for name in EXPERT_ARRAYS)
    out_TD, routing = apply_experts(
        normed_TD,
        router_of_layer(_stacked_router(experts, moe_layer)),
        flat,
        layer=moe_layer,
        valid_T=inputs.valid_T,
        config=config.experts,
        maps=inputs.maps,
        forced=_forced_of_layer(inputs, moe_layer),
        capacity=inputs.capacity,
    )
    if config.spec.experts.shared != "none":
        shared_TD = _shared_expert(params["shared"], normed_TD, moe_layer, config)
        out_TD = (out_TD.astype(jnp.float32) + shared_TD).astype(hidden_TD.dtype)
    added_TD = _scaled(out_TD, config.spec.residual_multiplier)
    return _Carry(hidden_TD, added_TD, kv_pages, carry.num_done + 1), routing


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
    return config.kernels.router_scores(normed_TD, gate_D1, score="sigmoid") * out_TD


def _dense_layer(
    params: Parameters, carry: _Carry, *, run: LayerRun, inputs: _StepInputs, config: ModelConfig
) -> tuple[_Carry, None]:
    layer, dense_layer = run.first + carry.num_done, run.first_of_kind + carry.num_done
    hidden_TD, normed_TD, kv_pages = _attention_block(params, carry, layer, inputs=inputs, config=config)
    dense = params["dense"]
    with jax.named_scope("dense_mlp"):
        weights = dense["gate_NDI"], dense["up_NDI"], dense["down_NID"]
        out_TD = config.plan.sum_over_tensor(config.kernels.mlp(normed_TD, weights, layer=dense_layer))
    added_TD = _scaled(out_TD.astype(hidden_TD.dtype), config.spec.residual_multiplier)
    return _Carry(hidden_TD, added_TD, kv_pages, carry.num_done + 1), None


def _attention_block(
    params: Parameters, carry: _Carry, layer: jax.Array, *, inputs: _StepInputs, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention with its norm and residual; returns the stream, the stream normed for the MLP, and the pool."""
    (hidden_TD, added_TD, kv_pages, _), weights = carry, params["attention"]
    hidden_TD, normed_TD = _add_and_norm(hidden_TD, added_TD, weights["norm_LD"], layer, config)
    with jax.named_scope("attention"):
        of_layer = AttentionInputs(weights, inputs.batch, inputs.rotation, layer, inputs.singles)
        attention = attention_config(config.spec, config.plan)
        out_TD, kv_pages = config.kernels.attention(normed_TD, kv_pages, of_layer, config=attention)
        out_TD = config.plan.sum_over_tensor(out_TD).astype(hidden_TD.dtype)
        out_TD = out_TD + weights["o_bias_LD"][layer] if "o_bias_LD" in weights else out_TD
    added_TD = _scaled(out_TD, config.spec.residual_multiplier)
    return *_add_and_norm(hidden_TD, added_TD, params["mlp_norm"]["scale"], layer, config), kv_pages


def _scaled(hidden_TD: jax.Array, factor: float) -> jax.Array:
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
    return hidden_TD, _norm(hidden_TD, scale_LD[layer], config)


def _norm(hidden_TD: jax.Array, scale_D: jax.Array, config: ModelConfig) -> jax.Array:
    with jax.named_scope("norm"):
        return config.kernels.norm(hidden_TD, scale_D, config.spec.norm_eps)


def _forced_of_layer(inputs: _StepInputs, moe_layer: jax.Array) -> ForcedExperts | None:
    if inputs.forced is None:
        return None
    forced_MXK, is_any = inputs.forced
    return ForcedExperts(forced_MXK[moe_layer].astype(jnp.int32), is_any)


def _stacked_router(experts: dict[str, jax.Array], layer: jax.Array) -> StackedRouter:
    return StackedRouter(experts["router_MDE"], experts.get("router_bias_ME"), experts.get("selection_bias_ME"), layer)


def _flatten(weights: jax.Array) -> jax.Array:
    """View [layers, slots, ...] as [layers * slots, ...]."""
    return weights.reshape(-1, *weights.shape[2:])
