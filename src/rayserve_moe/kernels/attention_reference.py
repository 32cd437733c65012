"""Paged causal attention in plain jnp: the definition that every other attention kernel is held to.

Blocks are computed one after the other. Each visits its keys in spans of a fixed number of positions with a running
softmax, and only as far as its own last position. So the result and the cost of a block depend on that block alone.
"""

# B query blocks   Q queries per block   H query heads   G KV heads   M queries * query heads per KV head
# h head width   P page-table width   N pages   S key positions per span

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
    pages_per_span = max(1, KEYS_PER_SPAN // kv_pages.shape[1])
    page_table_BP = jnp.pad(page_table_BP, ((0, 0), (0, -page_table_BP.shape[1] % pages_per_span)))

    def attend_one(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return _attend_block(block, kv_pages, pages_per_span=pages_per_span)

    return jax.lax.map(attend_one, (queries_BQHh, page_table_BP, positions_BQ))


def _attend_block(
    block: tuple[jax.Array, jax.Array, jax.Array], kv_pages: jax.Array, *, pages_per_span: int
) -> jax.Array:
    """One block: queries [Q, H, h], pages [P], positions [Q]; returns [Q, H, h]."""
    queries_QHh, pages_P, positions_Q = block
    num_queries, num_heads, width = queries_QHh.shape
    span, num_kv_heads = pages_per_span * kv_pages.shape[1], kv_pages.shape[2] // 2
    group = num_heads // num_kv_heads
    queries = (queries_QHh.astype(jnp.float32) * width**-0.5).reshape(num_queries, num_kv_heads, group, width)
    queries_GMh = queries.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * num_queries, width)
    positions_M = jnp.tile(positions_Q, group)
    last_position = jnp.max(positions_Q)

    def visit_span(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        ids = jax.lax.dynamic_slice_in_dim(pages_P, i * pages_per_span, pages_per_span)
        kv_SGh = kv_pages[ids].reshape(span, num_kv_heads, 2, width).astype(jnp.float32)
        keys_GSh, values_GSh = kv_SGh.transpose(2, 1, 0, 3)
        key_positions_S = i * span + jnp.arange(span)
        # A weight of zero does not silence what an earlier owner of the page left there: 0 * NaN is NaN.
        values_GSh = jnp.where((key_positions_S <= last_position)[:, None], values_GSh, 0.0)
        visible_MS = key_positions_S <= positions_M[:, None]
        return _accumulate(carry, queries_GMh, keys_GSh, values_GSh, visible_MS)

    rows = queries_GMh.shape[:2]
    start = (jnp.zeros((*rows, width)), jnp.full(rows, MASKED), jnp.zeros(rows))
    total_GMh, _, weight_GM = jax.lax.fori_loop(0, last_position // span + 1, visit_span, start)
    out = jnp.where((positions_M >= 0)[:, None], total_GMh / jnp.maximum(weight_GM, 1.0)[..., None], 0.0)
    out = out.reshape(num_kv_heads, group, num_queries, width).transpose(2, 0, 1, 3)
    return out.reshape(num_queries, num_heads, width).astype(queries_QHh.dtype)


def _accumulate(
    carry: tuple[jax.Array, ...],
    queries_GMh: jax.Array,
    keys_GSh: jax.Array,
    values_GSh: jax.Array,
    visible_MS: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One span of the running softmax: weighted values so far, largest score so far, sum of weights so far.

    The first span holds position 0, which every real query sees; so where a later span shows a query nothing, its
    largest score is a real one and the span's weights vanish.
    """
    total, largest, weight = carry
    scores = jnp.einsum("GMh,GSh->GMS", queries_GMh, keys_GSh, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.where(visible_MS, scores, MASKED)
    new_largest = jnp.maximum(largest, scores.max(-1))
    shrink = jnp.exp(largest - new_largest)
    weights = jnp.exp(scores - new_largest[..., None])
    values = jnp.einsum("GMS,GSh->GMh", weights, values_GSh, precision=jax.lax.Precision.HIGHEST)
    return total * shrink[..., None] + values, new_largest, weight * shrink + weights.sum(-1)
