"""Reference block index of block-sparse attention in plain jnp; it defines the other implementations.

The score of a block is the largest product of a query and a key in it. The choice of a query depends on its own scores
alone: the best `top_k` blocks, ties to the lower block.
"""

# B query blocks   Q queries per block   A index heads   d width of a head   P page-table width   N pages
# S key positions   M blocks of positions   K chosen blocks

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.kv_pool import read_wide
from rayserve_moe.kernels.reference.attention import KEYS_PER_SPAN, BlockPlaces
from rayserve_moe.kernels.reference.token_index import ascending_up_to, every_token, plain_scores


@dataclass(frozen=True)
class BlockChoice:
    """Constants of a choice of blocks, the same in all layers."""

    block_size: int
    """Positions of a block; blocks begin at multiples of it."""
    top_k: int
    """Maximum number of blocks that a query sees."""
    first_blocks: int = 0
    """Blocks at the begin of a sequence that every query sees."""
    local_blocks: int = 1
    """Blocks up to the query's own that it always sees."""


def choose_blocks(
    queries_BQAd: jax.Array, key_pages: jax.Array, places: BlockPlaces, *, choice: BlockChoice
) -> jax.Array:
    """Return the numbers of the blocks that each query sees: int32 [B, Q, A, K], ascending with -1 behind.

    Scores are float32, without a factor. Rows of `key_pages` [N, page, ...] begin with a key. Keys after a query's own
    position have no effect, even NaN. A product of NaN counts as infinite, like the query's own block. A query at
    position -1 is padding and sees nothing. K is `choice.top_k`, or the number of blocks of a page table if that is
    less.
    """
    choose_one = partial(_choose_of_queries, key_pages=key_pages, choice=choice)
    blocks = (queries_BQAd, places.page_table_BP, places.positions_BQ)
    return jax.lax.map(lambda block: choose_one(*block), blocks)


def _choose_of_queries(
    queries_QAd: jax.Array, pages_P: jax.Array, positions_Q: jax.Array, *, key_pages: jax.Array, choice: BlockChoice
) -> jax.Array:
    """Choose the blocks of queries of one sequence, [Q, A, K]."""
    num_blocks = -(-len(pages_P) * key_pages.shape[1] // choice.block_size)
    count, num_heads, own_Q = min(choice.top_k, num_blocks), queries_QAd.shape[1], positions_Q // choice.block_size

    def best() -> jax.Array:
        scores_QAM = _scores(
            queries_QAd, pages_P, positions_Q, key_pages=key_pages, num_blocks=num_blocks, choice=choice
        )
        numbers_M, own_Q11 = jnp.arange(num_blocks), own_Q[:, None, None]
        is_forced = (numbers_M < choice.first_blocks) | (numbers_M > own_Q11 - choice.local_blocks)
        scores_QAM = jnp.where(is_forced & (numbers_M <= own_Q11), jnp.inf, scores_QAM)
        _, numbers_QAK = jax.lax.top_k(scores_QAM, count)  # of equal scores the lower block comes first
        return ascending_up_to(numbers_QAK, own_Q11)

    def every() -> jax.Array:
        return jnp.repeat(every_token(own_Q, count)[:, None], num_heads, axis=1)

    return jax.lax.cond(jnp.max(own_Q) < count, every, best)


def _scores(
    queries_QAd: jax.Array,
    pages_P: jax.Array,
    positions_Q: jax.Array,
    *,
    key_pages: jax.Array,
    num_blocks: int,
    choice: BlockChoice,
) -> jax.Array:
    """Return the scores of all blocks, float32 [Q, A, M]: minus infinity after a query's own block."""
    page_size, (num_queries, num_heads, width) = key_pages.shape[1], queries_QAd.shape
    pages_per_span = max(1, KEYS_PER_SPAN // page_size)
    span = pages_per_span * page_size
    num_spans = -(-max(len(pages_P) * page_size, num_blocks * choice.block_size) // span)
    pages_P = jnp.pad(pages_P, (0, num_spans * pages_per_span - len(pages_P)))
    queries_QAd = queries_QAd.astype(jnp.float32)

    def visit_span(i: jax.Array, scores_QAS: jax.Array) -> jax.Array:
        rows = key_pages[jax.lax.dynamic_slice_in_dim(pages_P, i * pages_per_span, pages_per_span)]
        keys_Sd = read_wide(rows.reshape(span, -1)[:, :width])
        products_QAS = jnp.einsum("QAd,Sd->QAS", queries_QAd, keys_Sd, precision=jax.lax.Precision.HIGHEST)
        is_seen_Q1S = i * span + jnp.arange(span) <= positions_Q[:, None, None]
        products_QAS = jnp.where(is_seen_Q1S, plain_scores(products_QAS), -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(scores_QAS, products_QAS, i * span, axis=2)

    nothing_QAS = jnp.full((num_queries, num_heads, num_spans * span), -jnp.inf)
    scores_QAS = jax.lax.fori_loop(0, jnp.max(positions_Q) // span + 1, visit_span, nothing_QAS)
    in_blocks = scores_QAS[..., : num_blocks * choice.block_size].reshape(num_queries, num_heads, num_blocks, -1)
    return in_blocks.max(-1)
