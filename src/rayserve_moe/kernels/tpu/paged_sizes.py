"""Division of the paged attention kernel: tiles of queries, blocks of pages, and calls that scalar memory allows."""

# B query blocks   Q queries per block   C sets of heads   R query heads of a set   K lanes of keys
# T rows of a tile   M rows that are scored at once   S keys of a block

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax

from rayserve_moe.kernels.reference.attention import BlockPlaces, ScoreConfig
from rayserve_moe.kernels.tpu.byte_pairs import lanes_in_8_bits
from rayserve_moe.kernels.tpu.packed_rows import LANES, RowLayout, layout_of

CLEARED_ROWS = 16
"""Rows of the pool that are cleared at once, in whole registers of 16-bit numbers; pages are multiples of them."""
MAX_ROWS, SCORE_ROWS, ALIGNED_ROWS = 1024, 512, 16
"""Maximum rows of queries of a tile; rows that are scored at once; rows of whole registers of 16-bit numbers."""
VMEM_BYTES = 40 << 20
"""Maximum bytes of the core's memory for a call."""
SCORES = 32 << 10
"""Maximum number of scores at once: half of the capacity of a core's registers."""
GROUP_ROWS, GROUP_ALIGNED_ROWS, FEW_QUERIES = 128, 8, 4
"""Rows of a group of single tokens that are scored at once; rows of whole registers of 32-bit numbers; tokens of a
small group, which is common if drafts do not pay."""
PAGE_TABLE_BYTES = 768 << 10
"""Maximum size of the page ids of a call, of 1 MiB of scalar memory."""
MAX_KEYS, BLOCK_BYTES = 512, 1 << 20
"""Maximum keys of a block, and bytes of keys and values: as much as memory delivers in 0.6 us on v6e."""

NUM_BUFFERS = 4
"""Blocks of keys in the core's memory. One is multiplied while the others are copied. With only two, HBM would be idle
while a copy starts."""


class Knobs(NamedTuple):
    """Knobs of a model's attention besides its heads."""

    config: ScoreConfig
    sinks_H: jax.Array | None
    latent_width: int
    value_width: int = 0
    block_size: int = 0


@dataclass(frozen=True)
class TileShape:
    """The sizes of a call: blocks of `num_queries` in tiles of `tile_queries`, each with `query_rows` rows of a set.

    A block of keys has `num_pages` pages. Every core has equally many blocks of queries, some of padding. In a grouped
    call a block is a group of up to `num_queries` single tokens, and the step determines the number of groups.
    """

    layout: RowLayout
    num_cores: int
    num_blocks: int
    num_queries: int
    tile_queries: int
    query_rows: int
    table_width: int
    page_size: int
    num_pages: int
    config: ScoreConfig
    has_sinks: bool
    has_new_rows: bool = False
    is_grouped: bool = False
    has_choice: bool = False
    """True if queries see only chosen tokens; rows and keys then fill whole registers."""
    block_size: int = 0
    """Positions of a chosen block; 0 if single tokens are chosen."""

    @property
    def num_rows(self) -> int:
        """Return T, the rows of a tile with padding: half a register of 16 bits suffices for an only tile."""
        aligned = ALIGNED_ROWS // 2 if self.num_tiles == 1 else ALIGNED_ROWS
        if self.is_grouped and self.num_queries * self.query_rows > GROUP_ROWS:
            aligned = GROUP_ROWS
        return -(-self.tile_queries * self.query_rows // aligned) * aligned

    @property
    def score_rows(self) -> int:
        """Return M, the rows that are scored at once: all, or as many as divide them."""
        if self.is_grouped:
            return min(self.num_rows, GROUP_ROWS)
        cuts_queries = self.has_choice and SCORE_ROWS % self.query_rows
        return self.num_rows if cuts_queries or self.num_rows % SCORE_ROWS else SCORE_ROWS

    @property
    def few_rows(self) -> int:
        """Return the rows of a small group, at least as many as for `FEW_QUERIES`; `score_rows` without groups."""
        if not self.is_grouped:
            return self.score_rows
        return min(self.score_rows, -(-FEW_QUERIES * self.query_rows // ALIGNED_ROWS) * ALIGNED_ROWS)

    def sets_at_once(self, num_rows: int) -> int:
        """Return the number of sets of heads, at least 1, with scores of `num_rows` rows that fit into registers.

        Sets with choices of their own are scored one by one.
        """
        if self.has_choice:
            return 1
        return max(1, SCORES // (num_rows * self.num_keys))

    @property
    def choice_sets(self) -> int:
        """Return the number of sets with a choice of their own."""
        return self.layout.num_sets if self.block_size else 1

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles of a block of queries."""
        return self.num_queries // self.tile_queries

    @property
    def visits_per_core(self) -> int:
        return -(-self.num_blocks // self.num_cores) * self.num_tiles

    @property
    def num_keys(self) -> int:
        """Return S, the keys of a block."""
        return self.num_pages * self.page_size


def tile_queries_for(num_queries: int, query_rows: int) -> int:
    """Return the queries of a tile: all of a block, or as many of `query_rows` rows each as `MAX_ROWS` allows."""
    if num_queries * query_rows <= MAX_ROWS:
        return num_queries
    parts = (size for size in range(1, num_queries) if num_queries % size == 0)
    fitting = [size for size in parts if size * query_rows <= MAX_ROWS and size * query_rows % ALIGNED_ROWS == 0]
    return max(fitting, default=num_queries)


def pages_of_a_block(page_size: int, row_bytes: int, table_width: int) -> int:
    """Return the number of pages of a block of keys with rows of `row_bytes`, at most the pages of a sequence."""
    return max(1, min(MAX_KEYS // page_size, BLOCK_BYTES // (row_bytes * page_size), table_width))


def parts_of(num_blocks: int, table_width: int) -> list[slice]:
    """Return the blocks of each call: as many as have page ids that fit into scalar memory, at least 1."""
    per_call = max(1, PAGE_TABLE_BYTES // (4 * table_width))
    return [slice(first, min(first + per_call, num_blocks)) for first in range(0, num_blocks, per_call)]


def layout_for(kv_pages: jax.Array, head_dim: int, knobs: Knobs) -> RowLayout:
    """Return the layout of a pool's rows.

    Raises: ValueError for pages that are no multiple of `CLEARED_ROWS` keys, and for 8 bits that are not paired.
    """
    page_size = kv_pages.shape[1]
    if page_size % CLEARED_ROWS or kv_pages.dtype.itemsize == 1:
        raise ValueError(f"a pool of {kv_pages.dtype} in pages of {page_size} keys: 8 bits, or no multiple of 16")
    return layout_of(
        lanes_in_8_bits(kv_pages), head_dim, latent_width=knobs.latent_width, value_width=knobs.value_width
    )


def shape_for(
    kv_pages: jax.Array, places: BlockPlaces, layout: RowLayout, *, knobs: Knobs, queries: tuple[int, int, int]
) -> TileShape:
    """Return the sizes of calls without blocks; `queries`: queries of a block, queries of a tile, rows of a query."""
    table_width, page_size = places.page_table_BP.shape[1], kv_pages.shape[1]
    num_queries, tile_queries, query_rows = queries
    num_pages = pages_of_a_block(page_size, kv_pages.shape[2] * kv_pages.dtype.itemsize, table_width)
    has_choice = places.chosen_BQK is not None
    if has_choice:
        unit = LANES // math.gcd(page_size, LANES)
        num_pages = max(1, num_pages // unit) * unit
    return TileShape(
        layout=layout,
        num_cores=1,
        num_blocks=0,
        num_queries=num_queries,
        tile_queries=tile_queries,
        query_rows=query_rows,
        table_width=table_width,
        page_size=page_size,
        num_pages=num_pages,
        config=knobs.config,
        has_sinks=knobs.sinks_H is not None,
        has_choice=has_choice,
        block_size=knobs.block_size,
    )


MEAN_CLEARED_PIECES = 4
"""Mean number of pieces to clear behind a sequence's last key: half a page of 128 keys."""


def tile_trips(num_tiles: float, num_visits: float, num_pages: float) -> tuple[float, ...]:
    """Return the trips per entry of a call's loops without a static trip count, in the order of its schedule.

    The loops fill buffers (in the first tile only), request pages, visit blocks of keys, request pages, clear keys
    ahead of a window (counted as 0), and clear keys behind the last one.
    """
    blocks, pages = num_visits / (num_tiles or 1), num_pages / (num_visits or 1)
    return NUM_BUFFERS / (num_tiles or 1), pages, blocks, pages, 0.0, MEAN_CLEARED_PIECES / (blocks or 1)


def group_trips(
    num_groups: float, num_visits: float, num_pages: float, *, num_tokens: int, num_pieces: float
) -> tuple[float, ...]:
    """Return the trips per entry of a grouped call's loops, like `tile_trips`.

    Further loops visit groups, spread the positions of a group's tokens, put pieces and wait for them, and write tokens
    and wait for them.
    """
    *fill, blocks, pages, ahead, behind = tile_trips(num_groups, num_visits, num_pages)
    tokens, pieces = num_tokens / (num_groups or 1), num_pieces / (num_groups or 1)
    put = pieces / (blocks or 1), 1.0
    return num_groups, *fill, tokens, blocks, pages, *put, ahead, behind, tokens, tokens, tokens, pieces
