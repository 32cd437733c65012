"""Grouped-query attention of one layer over the paged KV pool."""

# T tokens   D model width   H local query heads   G local KV heads   h head width   B blocks   Q tokens per block

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.cpu_native import calls
from rayserve_moe.kernels.kv_update import write_kv
from rayserve_moe.kernels.registry import ATTENTION, KernelChoice
from rayserve_moe.model.layers import Rotation, project, rms_norm, rotate, rotation_of
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.token_batch import TokenBatch
from rayserve_moe.parallel.sharding import ParallelPlan


@dataclass(frozen=True)
class AttentionRule:
    """What is fixed about attention: the model's shapes, the kernels, the spread over devices."""

    spec: ModelSpec
    kernels: KernelChoice
    plan: ParallelPlan


class AttentionTokens(NamedTuple):
    """The tokens of a step, with their rotary angles: computed once, used by every layer."""

    batch: TokenBatch
    rotation: Rotation


def attention_tokens(batch: TokenBatch, spec: ModelSpec, *, is_native: bool = False) -> AttentionTokens:
    """Prepare the tokens of a step for all attention layers of a model; `is_native`: by the native CPU kernel."""
    if is_native:
        angles = calls.rotation_of(batch.positions_T, width=spec.attention.head_dim, theta=spec.rope.theta)
        return AttentionTokens(batch, Rotation(*angles))
    return AttentionTokens(batch, rotation_of(batch.positions_T, width=spec.attention.head_dim, theta=spec.rope.theta))


def attend_natively(
    hidden_TD: jax.Array,
    weights: dict[str, jax.Array],
    kv_pages: jax.Array,
    tokens: AttentionTokens,
    *,
    layer: jax.Array,
    rule: AttentionRule,
) -> tuple[jax.Array, jax.Array]:
    """`attend_layer` by the native CPU kernel; `weights` are those of all layers, packed."""
    batch, rotation = tokens
    inputs = calls.AttentionInputs(
        *rotation,
        batch.kv_slots_T,
        batch.positions_T,
        batch.page_table_BP,
        batch.num_singles,
    )
    out_TD, kv_pages = calls.attend_layer(hidden_TD, weights, kv_pages, inputs, layer=layer, eps=rule.spec.norm_eps)
    out_TD = rule.plan.sum_over_tensor(out_TD).astype(hidden_TD.dtype)
    return (out_TD + weights["o_bias_LD"][layer] if "o_bias_LD" in weights else out_TD), kv_pages


def attend_layer(
    hidden_TD: jax.Array,
    weights: dict[str, jax.Array],
    kv_pages: jax.Array,
    tokens: AttentionTokens,
    *,
    layer: jax.Array,
    rule: AttentionRule,
) -> tuple[jax.Array, jax.Array]:
    """Return the attention output [T, D], summed over devices, and the pool with this step's keys and values.

    `weights` are this layer's. `kv_pages` is [layers * pages, page, 2 * G, h]: page p of layer l lies at
    l * pages + p.
    """
    queries, keys, values = _project_heads(hidden_TD, weights, tokens.rotation, rule.spec)
    batch = tokens.batch
    pages_per_layer = kv_pages.shape[0] // rule.spec.num_layers
    first_page = layer * pages_per_layer
    kv_pages = write_kv(kv_pages, keys, values, batch.kv_slots_T + first_page * kv_pages.shape[1])
    attended_THh = _attend_blocks(queries, kv_pages, batch, first_page=first_page, kernels=rule.kernels)
    out = jnp.matmul(attended_THh.reshape(hidden_TD.shape[0], -1), weights["o_LHD"], preferred_element_type=jnp.float32)
    out = rule.plan.sum_over_tensor(out).astype(hidden_TD.dtype)
    return (out + weights["o_bias_LD"] if "o_bias_LD" in weights else out), kv_pages


def _project_heads(
    hidden_TD: jax.Array, weights: dict[str, jax.Array], rotation: Rotation, spec: ModelSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Project to heads, normalise and rotate queries and keys: three arrays [T, heads, h]."""
    tokens, width = hidden_TD.shape[0], spec.attention.head_dim
    queries = project(hidden_TD, weights["q_LDH"], weights.get("q_bias_LH")).reshape(tokens, -1, width)
    keys = project(hidden_TD, weights["k_LDG"], weights.get("k_bias_LG")).reshape(tokens, -1, width)
    values = project(hidden_TD, weights["v_LDG"], weights.get("v_bias_LG")).reshape(tokens, -1, width)
    if spec.attention.qk_norm == "head":
        queries = rms_norm(queries, weights["q_norm_Lh"], spec.norm_eps)
        keys = rms_norm(keys, weights["k_norm_Lh"], spec.norm_eps)
    return rotate(queries, rotation), rotate(keys, rotation), values


def _attend_blocks(
    queries_THh: jax.Array, kv_pages: jax.Array, batch: TokenBatch, *, first_page: jax.Array, kernels: KernelChoice
) -> jax.Array:
    """Attend the single tokens and the prefill blocks, each part with its kernel."""
    singles, (num_tokens, *head_shape) = batch.num_singles, queries_THh.shape
    page_table_BP = batch.page_table_BP + first_page
    parts = []
    if singles:
        attend = ATTENTION[kernels.decode_attention]
        positions = batch.positions_T[:singles, None]
        parts.append(attend(queries_THh[:singles, None], kv_pages, page_table_BP[:singles], positions)[:, 0])
    if batch.num_prefill_blocks:
        attend = ATTENTION[kernels.prefill_attention]
        blocks = (batch.num_prefill_blocks, (num_tokens - singles) // batch.num_prefill_blocks)
        queries_BQHh = queries_THh[singles:].reshape(*blocks, *head_shape)
        positions_BQ = batch.positions_T[singles:].reshape(blocks)
        attended = attend(queries_BQHh, kv_pages, page_table_BP[singles:], positions_BQ)
        parts.append(attended.reshape(num_tokens - singles, *head_shape))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
