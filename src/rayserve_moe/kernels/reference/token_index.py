"""Choice of tokens by the index of sparse attention in plain jnp: the definition of every other index kernel.

A block scores the keys of its sequence in spans, then takes the best of each query. The choice of a query depends on
its own scores alone: the best `top_k`, ties to the lower position.
"""

# B query blocks   Q queries per block   A index heads   d width of a head   P page-table width   N pages
# S key positions   K chosen tokens

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.kv_pool import read_wide
from rayserve_moe.kernels.reference.attention import KEYS_PER_SPAN, BlockPlaces

NONE = -1
"""Position of no token."""


def choose_tokens(
    queries_BQAd: jax.Array, weights_BQA: jax.Array, key_pages: jax.Array, places: BlockPlaces, *, top_k: int
) -> jax.Array:
    """Return the positions of the tokens that each query sees: int32 [B, Q, K], ascending with -1 behind.

    The score of a key is the sum over heads of weight * relu(query * key), float32. Rows of `key_pages` [N, page, ...]
    begin with a key. Keys after a query's own position have no effect, even NaN. A score of NaN counts as infinite, so
    that NaN is chosen and reaches the output. A query at position -1 is padding and sees nothing. K is
    `top_k`, or the number of positions of a page table if that is less.
    """
    choose_one = partial(_choose_block, key_pages=key_pages, top_k=top_k)
    blocks = (queries_BQAd, weights_BQA, places.page_table_BP, places.positions_BQ)
    return jax.lax.map(lambda block: choose_one(*block), blocks)


def every_token(positions: jax.Array, count: int) -> jax.Array:
    """Return for each of `positions` all positions up to it, [..., count]; `count` exceeds them all."""
    numbers_K = jnp.arange(count, dtype=jnp.int32)
    return jnp.where(numbers_K <= positions[..., None], numbers_K, NONE)


def ascending_up_to(numbers: jax.Array, last: jax.Array) -> jax.Array:
    """Return the positions or blocks [..., K] up to the `last` one that a query sees, ascending with -1 behind."""
    beyond = jnp.iinfo(jnp.int32).max
    numbers = jnp.sort(jnp.where(numbers <= last, numbers, beyond), axis=-1)
    return jnp.where(numbers == beyond, NONE, numbers).astype(jnp.int32)


def plain_scores(scores: jax.Array) -> jax.Array:
    """Return scores that sorting puts in the order of a choice: -0.0 ties with 0.0, and NaN is infinite."""
    return jnp.where(scores == 0.0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))


def _choose_block(
    queries_QAd: jax.Array,
    weights_QA: jax.Array,
    pages_P: jax.Array,
    positions_Q: jax.Array,
    *,
    key_pages: jax.Array,
    top_k: int,
) -> jax.Array:
    """Choose the tokens of the queries of a block, [Q, K]."""
    page_size = key_pages.shape[1]
    count, last_position = min(top_k, len(pages_P) * page_size), jnp.max(positions_Q)

    def best() -> jax.Array:
        scores_QS = _scores(queries_QAd, weights_QA, pages_P, positions_Q, key_pages=key_pages)
        _, places_QK = jax.lax.top_k(scores_QS, count)  # of equal scores the lower position comes first
        return ascending_up_to(places_QK, positions_Q[:, None])

    return jax.lax.cond(last_position < count, lambda: every_token(positions_Q, count), best)


def _scores(
    queries_QAd: jax.Array, weights_QA: jax.Array, pages_P: jax.Array, positions_Q: jax.Array, *, key_pages: jax.Array
) -> jax.Array:
    """Return the scores of all positions, float32 [Q, S]: minus infinity after a query's own position."""
    page_size, width = key_pages.shape[1], queries_QAd.shape[-1]
    pages_per_span = max(1, KEYS_PER_SPAN // page_size)
    span, num_positions = pages_per_span * page_size, len(pages_P) * page_size
    pages_P = jnp.pad(pages_P, (0, -len(pages_P) % pages_per_span))
    queries_QAd = queries_QAd.astype(jnp.float32)

    def visit_span(i: jax.Array, scores_QS: jax.Array) -> jax.Array:
        rows = key_pages[jax.lax.dynamic_slice_in_dim(pages_P, i * pages_per_span, pages_per_span)]
        keys_Sd = read_wide(rows.reshape(span, -1)[:, :width])
        products_QAS = jnp.einsum("QAd,Sd->QAS", queries_QAd, keys_Sd, precision=jax.lax.Precision.HIGHEST)
        sums_QS = jnp.einsum(
            "QA,QAS->QS", weights_QA, jnp.maximum(products_QAS, 0.0), precision=jax.lax.Precision.HIGHEST
        )
        is_seen_QS = i * span + jnp.arange(span) <= positions_Q[:, None]
        sums_QS = jnp.where(is_seen_QS, plain_scores(sums_QS), -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(scores_QS, sums_QS, i * span, axis=1)

    nothing_QS = jnp.full((len(positions_Q), len(pages_P) * page_size), -jnp.inf)
    scores_QS = jax.lax.fori_loop(0, jnp.max(positions_Q) // span + 1, visit_span, nothing_QS)
    return scores_QS[:, :num_positions]
