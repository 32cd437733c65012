"""Query blocks described as runs of rows, the way the ragged attention kernel wants them.

A run has the pages of its keys and their number; its last row stands at its last key. A block of queries becomes a run,
and neighbouring blocks of one prompt share one as long as it fits. Where a rule limits how far queries see, a run gets
only the pages within reach, so that its cost does not grow with the sequence.

    rows | block 0 | block 1 ..padding | block 2 ..padding |
    runs | run 0             | run 1             | not computed

Padding ahead of a run gives rows that are thrown away.
"""

# B query blocks   Q queries per block   P page-table width   C pieces per block   N pieces = B * C
# S runs (as many as pieces)   W pages within reach of a run

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_reference import ScoreRule


class Runs(NamedTuple):
    """The first `num_1[0]` of S runs count. All int32.

    Run s takes the rows from `row_borders[s]` to `row_borders[s + 1]` (S + 1 entries) and sees the `kv_lens_S[s]` keys
    on its pages.
    """

    kv_lens_S: jax.Array
    page_table_SW: jax.Array
    row_borders: jax.Array
    num_1: jax.Array


class _Pieces(NamedTuple):
    """Parts of blocks that may end a run: the block, its local chunk, position of the last token, the row after it."""

    block: jax.Array
    chunk: jax.Array
    end: jax.Array
    row_end: jax.Array


def runs_of(
    page_table_BP: jax.Array, positions_BQ: jax.Array, page_size: int, rule: ScoreRule, *, most_rows: int
) -> Runs:
    """Describe blocks as runs of at most `most_rows` rows, a multiple of Q; there is always one that counts.

    The real tokens of a block come first and stand at consecutive positions. A block is cut where a local chunk ends.
    It goes on into the next block where that continues it and lies in the same cell of `most_rows` rows.
    """
    num_queries, table_width = positions_BQ.shape[1], page_table_BP.shape[1]
    chunk_size = rule.chunk or table_width * page_size
    pieces, is_end_N = _pieces(page_table_BP, positions_BQ, chunk_size, rule, most_rows)
    if num_queries > 1:
        runs_so_far_N = jnp.cumsum(is_end_N)
        # Moves the ends to the front, in their order; what follows them does not count.
        place_S = jnp.searchsorted(runs_so_far_N, jnp.arange(1, is_end_N.size + 1), method="compare_all")
        pieces, num_runs = _Pieces(*(part.at[place_S].get(mode="clip") for part in pieces)), runs_so_far_N[-1]
        page_table_BP = page_table_BP[pieces.block]
    else:
        num_runs = jnp.max(jnp.where(is_end_N, jnp.arange(1, is_end_N.size + 1), 0))
    first_page_S = _first_page(pieces, chunk_size, page_size, rule, most_rows)
    reach = pages_within_reach(table_width, page_size, rule, most_rows=most_rows)
    return Runs(
        jnp.maximum(pieces.end + 1 - first_page_S * page_size, 1),
        page_table_BP if reach == table_width else _pages_from(page_table_BP, first_page_S, reach),
        jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.maximum(pieces.row_end, 1)]),
        jnp.maximum(num_runs, 1).astype(jnp.int32).reshape(1),
    )


def pages_within_reach(table_width: int, page_size: int, rule: ScoreRule, *, most_rows: int) -> int:
    """Pages that a run of `most_rows` rows can see, of the `table_width` that its sequence may have."""
    pages = [table_width]
    if rule.window:
        pages.append(-(-(most_rows + rule.window - 2) // page_size) + 1)
    if rule.chunk:
        pages.append(rule.chunk // page_size)
    return min(pages)


def pieces_per_block(num_queries: int, rule: ScoreRule) -> int:
    """Local chunks that a block of `num_queries` tokens can touch."""
    return 1 - (-(num_queries - 1) // rule.chunk) if rule.chunk else 1


def _pieces(
    page_table_BP: jax.Array, positions_BQ: jax.Array, chunk_size: int, rule: ScoreRule, most_rows: int
) -> tuple[_Pieces, jax.Array]:
    """Cut every block at the ends of local chunks; also which pieces end a run, bool [N]."""
    num_blocks, num_queries = positions_BQ.shape
    first_B = positions_BQ[:, 0]
    last_B = first_B + jnp.sum(positions_BQ >= 0, axis=1, dtype=jnp.int32) - 1
    chunk_BC = (first_B // chunk_size)[:, None] + jnp.arange(pieces_per_block(num_queries, rule), dtype=jnp.int32)
    end_BC = jnp.minimum(last_B[:, None], (chunk_BC + 1) * chunk_size - 1)
    block_BC = jnp.broadcast_to(jnp.arange(num_blocks, dtype=jnp.int32)[:, None], end_BC.shape)
    row_end_BC = block_BC * num_queries + end_BC - first_B[:, None] + 1
    goes_on_B = _goes_on(page_table_BP, first_B, last_B, num_queries, most_rows) & ((last_B + 1) % chunk_size != 0)
    is_piece_BC = (first_B >= 0)[:, None] & (chunk_BC * chunk_size <= last_B[:, None])
    is_end_BC = is_piece_BC & ~((end_BC == last_B[:, None]) & goes_on_B[:, None])
    pieces = (block_BC, chunk_BC, end_BC, row_end_BC)
    return _Pieces(*(part.reshape(-1) for part in pieces)), is_end_BC.reshape(-1)


def _goes_on(
    page_table_BP: jax.Array, first_B: jax.Array, last_B: jax.Array, num_queries: int, most_rows: int
) -> jax.Array:
    """Whether the next block holds the tokens that follow, in the same cell of rows, bool [B].

    Blocks with equal tables see the same keys, so they may share a run whosever they are.
    """
    blocks_per_cell = most_rows // num_queries
    if blocks_per_cell == 1:
        return jnp.zeros(first_B.shape, bool)
    is_full_B = last_B - first_B + 1 == num_queries
    next_first_B = jnp.concatenate([first_B[1:], jnp.full(1, -1, first_B.dtype)])
    same_pages_B = jnp.all(page_table_BP == jnp.roll(page_table_BP, -1, axis=0), axis=1)
    inside_cell_B = (jnp.arange(len(first_B)) + 1) % blocks_per_cell != 0
    return is_full_B & (next_first_B == last_B + 1) & same_pages_B & inside_cell_B


def _first_page(pieces: _Pieces, chunk_size: int, page_size: int, rule: ScoreRule, most_rows: int) -> jax.Array:
    """The first page of its sequence that a run gets, [S]."""
    first_key_S = jnp.zeros_like(pieces.end)
    if rule.window:
        first_key_S = jnp.maximum(first_key_S, pieces.end - most_rows - rule.window + 2)
    if rule.chunk:
        first_key_S = jnp.maximum(first_key_S, pieces.chunk * chunk_size)
    return first_key_S // page_size


def _pages_from(page_table_SP: jax.Array, first_page_S: jax.Array, reach: int) -> jax.Array:
    """`reach` pages of every run from its first one on, [S, W]; beyond its table the last page stands in."""
    place_SW = jnp.minimum(first_page_S[:, None] + jnp.arange(reach), page_table_SP.shape[1] - 1)
    return jnp.take_along_axis(page_table_SP, place_SW, axis=1)
