"""Query blocks described as runs of rows, the input of jax's ragged paged attention kernel.

A run has the pages of its keys and their number; its last row stands at its last key. A block of queries becomes a run,
and neighbouring blocks of one prompt share one as long as it fits. Where a window limits how far queries see, a run
gets only the pages within reach, so that its cost does not grow with the sequence.

    rows | block 0 | block 1 ..padding | block 2 ..padding |
    runs | run 0             | run 1             | not computed

Padding ahead of a run gives rows that are thrown away.
"""

# B query blocks   Q queries per block   P page-table width   S runs (as many as blocks)   W pages within reach of a run

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_reference import ScoreConfig


class Runs(NamedTuple):
    """The first `num_1[0]` of S runs count. All int32.

    Run s takes the rows from `row_borders[s]` to `row_borders[s + 1]` (S + 1 entries) and sees the `kv_lens_S[s]` keys
    on its pages.
    """

    kv_lens_S: jax.Array
    page_table_SW: jax.Array
    row_borders: jax.Array
    num_1: jax.Array


def runs_of(
    page_table_BP: jax.Array, positions_BQ: jax.Array, page_size: int, config: ScoreConfig, *, most_rows: int
) -> Runs:
    """Describe blocks as runs of at most `most_rows` rows, a multiple of Q; there is always one that counts.

    The real tokens of a block come first and stand at consecutive positions. A run continues into the next block where
    that continues the prompt and lies in the same cell of `most_rows` rows.
    """
    (num_blocks, num_queries), table_width = positions_BQ.shape, page_table_BP.shape[1]
    first_B, blocks_B = positions_BQ[:, 0], jnp.arange(num_blocks, dtype=jnp.int32)
    last_B = first_B + jnp.sum(positions_BQ >= 0, axis=1, dtype=jnp.int32) - 1
    row_end_B = blocks_B * num_queries + last_B - first_B + 1
    is_end_B = (first_B >= 0) & ~_continues(page_table_BP, first_B, last_B, num_queries, most_rows)
    if num_queries > 1:
        runs_so_far_B = jnp.cumsum(is_end_B)
        # Moves the ends to the front, in their order; what follows them does not count.
        block_S = jnp.searchsorted(runs_so_far_B, jnp.arange(1, num_blocks + 1), method="compare_all")
        last_S, row_end_S = (array_B.at[block_S].get(mode="clip") for array_B in (last_B, row_end_B))
        page_table_SP, num_runs = page_table_BP.at[block_S].get(mode="clip"), runs_so_far_B[-1]
    else:
        last_S, row_end_S, page_table_SP = last_B, row_end_B, page_table_BP
        num_runs = jnp.max(jnp.where(is_end_B, blocks_B + 1, 0))
    first_page_S = jnp.zeros_like(last_S)
    if config.window:
        first_page_S = jnp.maximum(last_S - most_rows - config.window + 2, 0) // page_size
    reach = pages_within_reach(table_width, page_size, config, most_rows=most_rows)
    return Runs(
        jnp.maximum(last_S + 1 - first_page_S * page_size, 1),
        page_table_SP if reach == table_width else _pages_from(page_table_SP, first_page_S, reach),
        jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.maximum(row_end_S, 1)]),
        jnp.maximum(num_runs, 1).astype(jnp.int32).reshape(1),
    )


def pages_within_reach(table_width: int, page_size: int, config: ScoreConfig, *, most_rows: int) -> int:
    """Pages that a run of `most_rows` rows can see, of the `table_width` that its sequence may have."""
    if not config.window:
        return table_width
    return min(table_width, -(-(most_rows + config.window - 2) // page_size) + 1)


def _continues(
    page_table_BP: jax.Array, first_B: jax.Array, last_B: jax.Array, num_queries: int, most_rows: int
) -> jax.Array:
    """Whether the next block holds the tokens that follow, in the same cell of rows, bool [B].

    Blocks with equal tables see the same keys, so they may share a run even of different sequences.
    """
    blocks_per_cell = most_rows // num_queries
    if blocks_per_cell == 1:
        return jnp.zeros(first_B.shape, bool)
    is_full_B = last_B - first_B + 1 == num_queries
    next_first_B = jnp.concatenate([first_B[1:], jnp.full(1, -1, first_B.dtype)])
    same_pages_B = jnp.all(page_table_BP == jnp.roll(page_table_BP, -1, axis=0), axis=1)
    inside_cell_B = (jnp.arange(len(first_B)) + 1) % blocks_per_cell != 0
    return is_full_B & (next_first_B == last_B + 1) & same_pages_B & inside_cell_B


def _pages_from(page_table_SP: jax.Array, first_page_S: jax.Array, reach: int) -> jax.Array:
    """`reach` pages of every run from its first one on, [S, W]; beyond its table the last page is repeated."""
    place_SW = jnp.minimum(first_page_S[:, None] + jnp.arange(reach), page_table_SP.shape[1] - 1)
    return jnp.take_along_axis(page_table_SP, place_SW, axis=1)
