"""Paged causal attention in plain jnp: the definition that every other attention kernel is held to.

Keys are visited in spans of a fixed number of positions with a running softmax, and only as far as the longest
sequence of the call reaches. So the result of a row depends on that row alone, never on its company.
"""

# B query blocks   Q queries per block   H query heads   G KV heads   R query heads per KV head   h head width
# P page-table width   N pages   S key positions per span

from __future__ import annotations

import jax
import jax.numpy as jnp

KEYS_PER_SPAN = 128
MASKED = -1e30


def attend(
    queries_BQHh: jax.Array, kv_pages: jax.Array, page_table_BP: jax.Array, positions_BQ: jax.Array
) -> jax.Array:
    """Attend each query to the keys of its block's sequence at positions up to its own.

    `kv_pages` is [N, page, 2 * G, h], K and V of a head next to each other. A query at position -1 is padding and
    gives zeros. Whatever a page holds beyond the block's last position, NaN too, is without effect. Returns
    [B, Q, H, h] in the queries' dtype.
    """
    num_blocks, num_queries, num_heads, width = queries_BQHh.shape
    page_size, num_kv_heads = kv_pages.shape[1], kv_pages.shape[2] // 2
    pages_per_span = max(1, KEYS_PER_SPAN // page_size)
    span = pages_per_span * page_size
    page_table_BP = _pad_to_multiple(page_table_BP, pages_per_span)
    group = num_heads // num_kv_heads
    queries = queries_BQHh.astype(jnp.float32) * (width**-0.5)
    queries = queries.reshape(num_blocks, num_queries, num_kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    queries_BGMh = queries.reshape(num_blocks, num_kv_heads, group * num_queries, width)
    query_positions_BM = jnp.tile(positions_BQ, (1, group))

    def visit_span(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        ids_BP = jax.lax.dynamic_slice_in_dim(page_table_BP, i * pages_per_span, pages_per_span, axis=1)
        kv_BSGh = kv_pages[ids_BP].reshape(num_blocks, span, num_kv_heads, 2, width).astype(jnp.float32)
        key_positions_S = i * span + jnp.arange(span)
        # A weight of zero does not silence what an earlier owner of the page left there: 0 * NaN is NaN.
        is_held_BS = key_positions_S <= positions_BQ.max(axis=1, keepdims=True)
        keys, values = kv_BSGh[:, :, :, 0], jnp.where(is_held_BS[..., None, None], kv_BSGh[:, :, :, 1], 0.0)
        visible = key_positions_S <= query_positions_BM[:, :, None]
        return _accumulate(carry, queries_BGMh, keys, values, visible[:, None])

    rows = queries_BGMh.shape[:3]
    start = (jnp.zeros((*rows, width)), jnp.full(rows, MASKED), jnp.zeros(rows))
    num_spans = jnp.max(positions_BQ) // span + 1
    total, _, weight = jax.lax.fori_loop(0, num_spans, visit_span, start)
    out = total / jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)[..., None]
    out = out.reshape(num_blocks, num_kv_heads, group, num_queries, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(num_blocks, num_queries, num_heads, width).astype(queries_BQHh.dtype)


def _accumulate(
    carry: tuple[jax.Array, ...],
    queries_BGMh: jax.Array,
    keys_BSGh: jax.Array,
    values_BSGh: jax.Array,
    visible_B1MS: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One span of the running softmax: weighted values so far, largest score so far, sum of weights so far."""
    total, largest, weight = carry
    scores = jnp.einsum("BGMh,BSGh->BGMS", queries_BGMh, keys_BSGh, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.where(visible_B1MS, scores, MASKED)
    new_largest = jnp.maximum(largest, scores.max(-1))
    shrink = jnp.exp(largest - new_largest)
    weights = jnp.where(visible_B1MS, jnp.exp(scores - new_largest[..., None]), 0.0)
    values = jnp.einsum("BGMS,BSGh->BGMh", weights, values_BSGh, precision=jax.lax.Precision.HIGHEST)
    return total * shrink[..., None] + values, new_largest, weight * shrink + weights.sum(-1)


def _pad_to_multiple(page_table_BP: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(page_table_BP, ((0, 0), (0, -page_table_BP.shape[1] % multiple)))
