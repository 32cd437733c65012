"""How the paged attention kernel is cut: tiles of queries, blocks of pages, and calls that scalar memory allows."""

# B query blocks   Q queries per block   C sets of heads   R query heads of a set   K lanes of keys
# T rows of a tile   M rows that are scored at once   S keys of a block

from __future__ import annotations

from dataclasses import dataclass

from rayserve_moe.kernels.attention_blocks import PAGE_TABLE_BYTES
from rayserve_moe.kernels.attention_reference import ScoreConfig
from rayserve_moe.kernels.flat_rows import RowLayout

MOST_ROWS, SCORE_ROWS, ALIGNED_ROWS = 1024, 512, 16
"""Rows of queries of a tile; those that are scored at once; whole registers of 16-bit numbers."""
SCORES = 32 << 10
"""Scores that are kept at once: half of what the registers of a core hold."""
MOST_KEYS, BLOCK_BYTES = 512, 1 << 20
"""Keys of a block, and what they and their values take: what memory delivers in 0.6 us on v6e."""


@dataclass(frozen=True)
class TileShape:
    """How a call is cut: blocks of `num_queries` into tiles of `tile_queries`, each with `query_rows` rows of a set.

    A block of keys has `num_pages` pages. Every core has equally many blocks of queries, some of padding.
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
    is_tree: bool
    has_new_rows: bool = False

    @property
    def num_rows(self) -> int:
        """T: rows of a tile with padding; half a register's of 16 bits do for one tile of a block."""
        aligned = ALIGNED_ROWS // 2 if self.num_tiles == 1 else ALIGNED_ROWS
        return -(-self.tile_queries * self.query_rows // aligned) * aligned

    @property
    def score_rows(self) -> int:
        """M: all rows, or as many as divide them."""
        return self.num_rows if self.num_rows % SCORE_ROWS else SCORE_ROWS

    @property
    def sets_at_once(self) -> int:
        """Sets of heads whose scores registers hold; at least one."""
        return max(1, SCORES // (self.score_rows * self.num_keys))

    @property
    def num_tiles(self) -> int:
        """Tiles of a block of queries."""
        return self.num_queries // self.tile_queries

    @property
    def visits_per_core(self) -> int:
        return -(-self.num_blocks // self.num_cores) * self.num_tiles

    @property
    def num_keys(self) -> int:
        """S: keys of a block."""
        return self.num_pages * self.page_size


def tile_queries_for(num_queries: int, query_rows: int) -> int:
    """How many queries of a block make a tile: all, or as many of `query_rows` rows each as `MOST_ROWS` allows."""
    if num_queries * query_rows <= MOST_ROWS:
        return num_queries
    parts = (size for size in range(1, num_queries) if num_queries % size == 0)
    fitting = [size for size in parts if size * query_rows <= MOST_ROWS and size * query_rows % ALIGNED_ROWS == 0]
    return max(fitting, default=num_queries)


def pages_of_a_block(page_size: int, row_bytes: int, table_width: int) -> int:
    """Pages of a block of keys, whose rows take `row_bytes`: within the bounds, and no more than a sequence has."""
    return max(1, min(MOST_KEYS // page_size, BLOCK_BYTES // (row_bytes * page_size), table_width))


def blocks_per_call(table_width: int) -> int:
    """How many rows of page ids fit into the scalar memory of one call; at least one."""
    return max(1, PAGE_TABLE_BYTES // (4 * table_width))
