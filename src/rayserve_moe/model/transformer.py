"""The decoder: from token ids to hidden states, with routing ids and expert counts as outputs."""

# T tokens   D model width   L layers   M MoE layers   E experts   K experts per token   V vocabulary (local share)

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.layer import ExpertRule, apply_experts
from rayserve_moe.experts.local import ExpertWeights
from rayserve_moe.kernels.registry import KernelChoice
from rayserve_moe.model.attention import AttentionRule, AttentionTokens, attend_layer, attention_tokens
from rayserve_moe.model.layers import gated_mlp, rms_norm
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.token_batch import TokenBatch
from rayserve_moe.parallel.sharding import ParallelPlan

Parameters = dict[str, dict[str, jax.Array]]
Carry = tuple[jax.Array, jax.Array]
LayerIndex = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class ModelRule:
    """All that is fixed when a step is compiled: the model, where it lies, and its kernels."""

    spec: ModelSpec
    plan: ParallelPlan
    kernels: KernelChoice

    @property
    def attention(self) -> AttentionRule:
        return AttentionRule(self.spec, self.kernels, self.plan)

    @property
    def experts(self) -> ExpertRule:
        router = self.spec.router
        return ExpertRule(router.num_experts, router.top_k, router.renormalize, self.kernels.experts, self.plan)


class ForwardOutput(NamedTuple):
    """Hidden states before the final norm [T, D], the updated pool, routing [M, T, K] and counts [M, E]."""

    hidden_TD: jax.Array
    kv_pages: jax.Array
    topk_ids_MTK: jax.Array
    expert_counts_ME: jax.Array


class _LayerRun(NamedTuple):
    """Neighbouring layers of one kind: `first` counts all layers, `first_of_kind` those of that kind."""

    is_moe: bool
    first: int
    first_of_kind: int
    length: int


def forward(params: Parameters, kv_pages: jax.Array, batch: TokenBatch, *, rule: ModelRule) -> ForwardOutput:
    """Run all layers on one device's share; call it inside the sharded step.

    `params` and `kv_pages` are local shares. Routing is captured before any mapping to slots, in router order.
    """
    hidden_TD = _embed(params["embedding"]["table_VD"], batch.token_ids_T, rule.plan)
    tokens = attention_tokens(batch, rule.spec)
    routing, counts = [], []
    for run in _layer_runs(rule.spec):
        body = _moe_layer if run.is_moe else _dense_layer

        def visit(
            carry: Carry, index: LayerIndex, body: Callable = body
        ) -> tuple[Carry, tuple[jax.Array, jax.Array] | None]:
            return body(params, carry, tokens, index, rule)

        steps = jnp.arange(run.length)
        carry, captured = jax.lax.scan(visit, (hidden_TD, kv_pages), (run.first + steps, run.first_of_kind + steps))
        hidden_TD, kv_pages = carry
        if captured is not None:
            routing.append(captured[0])
            counts.append(captured[1])
    return ForwardOutput(hidden_TD, kv_pages, jnp.concatenate(routing), jnp.concatenate(counts))


def logits_of(params: Parameters, hidden_SD: jax.Array, *, rule: ModelRule) -> jax.Array:
    """Final norm and head: float32 logits over the whole vocabulary, the same on every device."""
    embedding = params["embedding"]
    normed = rms_norm(hidden_SD, embedding["final_norm_D"], rule.spec.norm_eps)
    if "head_DV" in embedding:
        logits = jnp.matmul(normed, embedding["head_DV"], preferred_element_type=jnp.float32)
    else:
        logits = jnp.einsum("SD,VD->SV", normed, embedding["table_VD"], preferred_element_type=jnp.float32)
    return rule.plan.gather_last_dim(logits)


def _moe_layer(
    params: Parameters, carry: Carry, tokens: AttentionTokens, index: LayerIndex, rule: ModelRule
) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
    layer, moe_layer = index
    hidden_TD, normed_TD, kv_pages = _attention_block(params, carry, tokens, layer, rule)
    experts = params["experts"]
    flat = ExpertWeights(*(_flatten(experts[name]) for name in ("gate_MEDF", "up_MEDF", "down_MEFD")))
    out_TD, ids_TK, counts_E = apply_experts(
        normed_TD,
        experts["router_MDE"][moe_layer],
        flat,
        layer=moe_layer,
        valid_T=tokens.batch.valid_T,
        rule=rule.experts,
    )
    return (hidden_TD + out_TD, kv_pages), (ids_TK, counts_E)


def _dense_layer(
    params: Parameters, carry: Carry, tokens: AttentionTokens, index: LayerIndex, rule: ModelRule
) -> tuple[Carry, None]:
    layer, dense_layer = index
    hidden_TD, normed_TD, kv_pages = _attention_block(params, carry, tokens, layer, rule)
    weights = _of_layer(params["dense"], dense_layer)
    out_TD = gated_mlp(normed_TD, weights["gate_NDI"], weights["up_NDI"], weights["down_NID"])
    return (hidden_TD + rule.plan.sum_over_tensor(out_TD).astype(hidden_TD.dtype), kv_pages), None


def _attention_block(
    params: Parameters, carry: Carry, tokens: AttentionTokens, layer: jax.Array, rule: ModelRule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention with its norm and residual; returns the stream, the stream normed for the MLP, and the pool."""
    hidden_TD, kv_pages = carry
    weights, eps = _of_layer(params["attention"], layer), rule.spec.norm_eps
    normed_TD = rms_norm(hidden_TD, weights["norm_LD"], eps)
    out_TD, kv_pages = attend_layer(normed_TD, weights, kv_pages, tokens, layer=layer, rule=rule.attention)
    hidden_TD = hidden_TD + out_TD
    return hidden_TD, rms_norm(hidden_TD, params["mlp_norm"]["scale"][layer], eps), kv_pages


def _embed(table_VD: jax.Array, token_ids_T: jax.Array, plan: ParallelPlan) -> jax.Array:
    """Look up rows of a table whose vocabulary is split over the tensor axis."""
    local_T = token_ids_T - plan.tensor_rank() * table_VD.shape[0]
    here_T = (local_T >= 0) & (local_T < table_VD.shape[0])
    rows_TD = jnp.where(here_T[:, None], table_VD[jnp.where(here_T, local_T, 0)], 0)
    return plan.sum_over_tensor(rows_TD)


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
