"""The decoder: from token ids to hidden states, with routing ids and expert counts as outputs."""

# T tokens   X tokens in prefill blocks   D model width   L layers   M MoE layers   E experts   K experts per token
# V vocabulary (local share)

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.balanced_layer import Room, room_of
from rayserve_moe.experts.layer import apply_experts
from rayserve_moe.experts.local import ExpertWeights
from rayserve_moe.experts.routing import ForcedPicks
from rayserve_moe.experts.rule import ExpertRule
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.cpu_native.calls import expert_sums, product
from rayserve_moe.kernels.cpu_native.calls import rms_norm as native_rms_norm
from rayserve_moe.kernels.registry import KernelChoice
from rayserve_moe.model.attention import (
    AttentionRule,
    AttentionTokens,
    attend_layer,
    attend_natively,
    attention_tokens,
)
from rayserve_moe.model.layers import gated_mlp, rms_norm
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.token_batch import TokenBatch
from rayserve_moe.model.vocabulary import look_up, score_all
from rayserve_moe.parallel.sharding import ParallelPlan

Parameters = dict[str, dict[str, jax.Array]]
Carry = tuple[jax.Array, jax.Array]
LayerIndex = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class ModelRule:
    """All that is fixed when a step is compiled: the model, where it lies, and its kernels.

    A layer has `num_redundant` expert slots more than experts. `expert_backend` names how tokens and experts meet (see
    `experts.backends`; `auto`: by the number of tokens), `slot_choice` which of an expert's slots a token takes,
    `expert_selection` and `capacity_scope` how experts are selected (see `experts.rule`).
    """

    spec: ModelSpec
    plan: ParallelPlan
    kernels: KernelChoice
    num_redundant: int = 0
    expert_backend: str = "auto"
    slot_choice: str = "shares"
    expert_selection: str = "replicas_only"
    capacity_scope: str = "global"

    @property
    def attention(self) -> AttentionRule:
        return AttentionRule(self.spec, self.kernels, self.plan)

    @property
    def experts(self) -> ExpertRule:
        router = self.spec.router
        return ExpertRule(
            router.num_experts,
            router.top_k,
            router.renormalize,
            self.kernels.experts,
            self.plan,
            num_redundant=self.num_redundant,
            backend=self.expert_backend,
            slot_choice="first" if self.expert_selection == "topk" and self.num_redundant else self.slot_choice,
            selection=self.expert_selection,
            capacity_scope=self.capacity_scope,
        )


class ForwardOutput(NamedTuple):
    """Hidden states before the final norm [T, D], the updated pool, routing [M, T, K] and counts [M, E].

    Where slots have limited room, also the sum of the layers' tallies (`LimitedPicks`).
    All of this data rank's tokens alone, and the same on every device of its tensor group (but for the pool).
    """

    hidden_TD: jax.Array
    kv_pages: jax.Array
    topk_ids_MTK: jax.Array
    expert_counts_ME: jax.Array
    tally_4: jax.Array | None


class _Captured(NamedTuple):
    """What MoE layers tell of their selection: ids, counts and tally of each."""

    ids_MTK: jax.Array
    counts_ME: jax.Array
    tally_M4: jax.Array | None


class _StepTokens(NamedTuple):
    """What all layers of a step share: its tokens, the slots of the experts, what routing is forced [M, X, K], and
    the room of slots where that is limited."""

    attention: AttentionTokens
    maps: PlacementArrays | None
    forced: tuple[jax.Array, jax.Array] | None
    room: Room | None


class _LayerRun(NamedTuple):
    """Neighbouring layers of one kind: `first` counts all layers, `first_of_kind` those of that kind."""

    is_moe: bool
    first: int
    first_of_kind: int
    length: int


def forward(  # noqa: PLR0913 (what differs from call to call is by keyword)
    params: Parameters,
    kv_pages: jax.Array,
    batch: TokenBatch,
    *,
    rule: ModelRule,
    maps: PlacementArrays | None = None,
    forced_MXK: jax.Array | None = None,
    capacity_factor: jax.Array | None = None,
) -> ForwardOutput:
    """Run all layers on one device's share; call it inside the sharded step.

    `params` and `kv_pages` are local shares, `batch` is this data rank's: every rank comes with one of the same shape,
    padding where it has nothing to do. `maps` say in which slots experts lie, for all MoE layers and the same on every
    device; None stands for expert i in slot i. Routing is captured before any mapping to slots, in router order.
    `forced_MXK` replaces what routers select for the tokens in prefill blocks, where it is not negative; a balanced
    selection takes no orders. `capacity_factor` is a float32 for rules that limit the room of slots.
    """
    is_native = rule.kernels.is_native
    is_packed = is_native and rule.spec.tie_embeddings
    hidden_TD = look_up(params["embedding"]["table_VD"], batch.token_ids_T, plan=rule.plan, is_packed=is_packed)
    forced = None
    if forced_MXK is not None and rule.expert_selection != "balanced":
        forced = forced_MXK, jnp.any(forced_MXK >= 0)
    of_attention = attention_tokens(batch, rule.spec, is_native=is_native)
    room = None
    if rule.experts.limits_room:
        assert capacity_factor is not None, "slots with limited room need a factor"
        room = room_of(batch.valid_T, capacity_factor, rule=rule.experts)
    tokens = _StepTokens(of_attention, maps, forced, room)
    runs_captured = []
    for run in _layer_runs(rule.spec):
        body = _moe_layer if run.is_moe else _dense_layer

        def visit(carry: Carry, index: LayerIndex, body: Callable = body) -> tuple[Carry, _Captured | None]:
            return body(params, carry, tokens, index, rule)

        steps = jnp.arange(run.length)
        carry, captured = jax.lax.scan(visit, (hidden_TD, kv_pages), (run.first + steps, run.first_of_kind + steps))
        hidden_TD, kv_pages = carry
        if captured is not None:
            runs_captured.append(captured)
    captured = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *runs_captured)
    tally_4 = None if captured.tally_M4 is None else jnp.sum(captured.tally_M4, axis=0, dtype=jnp.int32)
    return ForwardOutput(hidden_TD, kv_pages, captured.ids_MTK, captured.counts_ME, tally_4)


def logits_of(params: Parameters, hidden_SD: jax.Array, *, rule: ModelRule) -> jax.Array:
    """Final norm and head: float32 logits over the whole vocabulary [S, V] of this data rank's `hidden_SD`.

    They are the same on every device of a tensor group, so that all of them sample the same tokens.
    """
    embedding = params["embedding"]
    norm = native_rms_norm if rule.kernels.is_native else rms_norm
    normed_SD = norm(hidden_SD, embedding["final_norm_D"], rule.spec.norm_eps)

    def score_my_part(hidden_WD: jax.Array) -> jax.Array:
        head_VD = embedding.get("head_VD", embedding["table_VD"])
        if rule.kernels.is_native:  # packed as the right side of a product, whose shape is [D, V]
            return product(hidden_WD, head_VD.reshape(head_VD.shape[::-1]))
        return jnp.einsum("SD,VD->SV", hidden_WD, head_VD, preferred_element_type=jnp.float32)

    return score_all(normed_SD, score_my_part, vocab_size=rule.spec.vocab_size, plan=rule.plan)


def _moe_layer(
    params: Parameters, carry: Carry, tokens: _StepTokens, index: LayerIndex, rule: ModelRule
) -> tuple[Carry, _Captured]:
    layer, moe_layer = index
    hidden_TD, normed_TD, kv_pages = _attention_block(params, carry, tokens.attention, layer, rule)
    experts = params["experts"]
    flat = ExpertWeights(*(_flatten(experts[name]) for name in ("gate_MPDF", "up_MPDF", "down_MPFD")))
    out = apply_experts(
        normed_TD,
        experts["router_MDE"][moe_layer],
        flat,
        layer=moe_layer,
        valid_T=tokens.attention.batch.valid_T,
        rule=rule.experts,
        maps=tokens.maps,
        forced=_forced_of_layer(tokens, moe_layer),
        room=tokens.room,
    )
    return (hidden_TD + out.out_TD, kv_pages), _Captured(out.ids_TK, out.counts_E, out.tally_4)


def _dense_layer(
    params: Parameters, carry: Carry, tokens: _StepTokens, index: LayerIndex, rule: ModelRule
) -> tuple[Carry, None]:
    layer, dense_layer = index
    hidden_TD, normed_TD, kv_pages = _attention_block(params, carry, tokens.attention, layer, rule)
    if rule.kernels.is_native:
        out_TD = _gated_natively(normed_TD, params["dense"], dense_layer)
    else:
        weights = _of_layer(params["dense"], dense_layer)
        out_TD = gated_mlp(normed_TD, weights["gate_NDI"], weights["up_NDI"], weights["down_NID"])
    return (hidden_TD + rule.plan.sum_over_tensor(out_TD).astype(hidden_TD.dtype), kv_pages), None


def _gated_natively(normed_TD: jax.Array, dense: dict[str, jax.Array], dense_layer: jax.Array) -> jax.Array:
    """`gated_mlp` by the native CPU kernel: every token takes the one expert that there is."""
    slots_T1 = jnp.zeros((len(normed_TD), 1), jnp.int32)
    weights = dense["gate_NDI"], dense["up_NDI"], dense["down_NID"]
    ones_T1 = jnp.ones(slots_T1.shape, jnp.float32)
    return expert_sums(normed_TD, slots_T1, ones_T1, weights, first_slot=dense_layer, num_slots=1)


def _attention_block(
    params: Parameters, carry: Carry, tokens: AttentionTokens, layer: jax.Array, rule: ModelRule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention with its norm and residual; returns the stream, the stream normed for the MLP, and the pool."""
    hidden_TD, kv_pages = carry
    weights, eps = _of_layer(params["attention"], layer), rule.spec.norm_eps
    norm = native_rms_norm if rule.kernels.is_native else rms_norm
    normed_TD = norm(hidden_TD, weights["norm_LD"], eps)
    if rule.kernels.is_native:
        attend, weights = attend_natively, params["attention"]
    else:
        attend = attend_layer
    out_TD, kv_pages = attend(normed_TD, weights, kv_pages, tokens, layer=layer, rule=rule.attention)
    hidden_TD = hidden_TD + out_TD
    return hidden_TD, norm(hidden_TD, params["mlp_norm"]["scale"][layer], eps), kv_pages


def _forced_of_layer(tokens: _StepTokens, moe_layer: jax.Array) -> ForcedPicks | None:
    if tokens.forced is None:
        return None
    forced_MXK, is_any = tokens.forced
    return ForcedPicks(forced_MXK[moe_layer].astype(jnp.int32), is_any)


def _of_layer(weights: dict[str, jax.Array], layer: jax.Array) -> dict[str, jax.Array]:
    return {name: stacked[layer] for name, stacked in weights.items()}


def _flatten(weights: jax.Array) -> jax.Array:
    """View [layers, slots, ...] as [layers * slots, ...]."""
    return weights.reshape(-1, *weights.shape[2:])


def _layer_runs(spec: ModelSpec) -> Iterator[_LayerRun]:
    """Cut the layers into runs of one kind."""
    first_of_kind = {True: 0, False: 0}
    kinds = ((i not in spec.dense_layer_ids) for i in range(spec.num_layers))
    first = 0
    for is_moe, run in groupby(kinds):
        length = sum(1 for _ in run)
        yield _LayerRun(is_moe, first, first_of_kind[is_moe], length)
        first_of_kind[is_moe] += length
        first += length
