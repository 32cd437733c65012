"""The body of the paged attention kernel: one tile of queries of one block, over the pages within its reach."""

# T rows of a tile: queries * R, padded   R query heads of a set   M rows that are scored at once   C sets
# K lanes of keys   V lanes of values   S key positions of a block   X lanes of a row of the pool

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rayserve_moe.kernels.attention_reference import MASKED
from rayserve_moe.kernels.paged_sizes import TileShape
from rayserve_moe.kernels.paged_stream import PageStream, Scalars


class Sums(NamedTuple):
    """The online softmax of a tile: largest score and sum of weights [C, T, 1], weighted values [C, T, V]."""

    largest: Any
    weight: Any
    total: Any


class Tile(NamedTuple):
    """A tile that is attended: its visit, queries [1, C, T, K], sums, and positions and ancestors of rows [2, T, 1]."""

    visit: jax.Array
    queries: Any
    sums: Sums
    places: Any
    shape: TileShape


def attend_tile(*refs: Any, shape: TileShape) -> None:
    """A step of the grid. `refs` are scalars, queries, sinks [C, T, 1], the pool, the output [1, C, T, V]; two blocks
    of the pool, `Sums`, places of rows, the number of blocks so far, and a semaphore of each block."""
    scalars, (queries, sinks, pool, out), (blocks, *sums, places, num_done, arrivals) = (
        Scalars(*refs[:6]),
        refs[6:10],
        refs[10:],
    )
    stream = PageStream(
        scalars, pool, blocks, arrivals, shape.num_tiles, shape.table_width, shape.num_pages, shape.page_size
    )
    begin = pl.program_id(0) * shape.visits_per_core
    tile = Tile(begin + pl.program_id(1), queries, Sums(*sums), places, shape)
    num_blocks = stream.num_blocks(tile.visit)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        num_done[0] = 0
        blocks[...] = jnp.zeros_like(blocks)
        stream.start_next(begin, begin + shape.visits_per_core, jnp.int32(0))

    def attend_block(i: jax.Array, carry: None) -> None:
        half = jax.lax.rem(num_done[0], 2)

        @pl.when(i + 1 < num_blocks)
        def _() -> None:
            stream.start(tile.visit, i + 1, 1 - half)

        @pl.when(i + 1 == num_blocks)
        def _() -> None:
            stream.start_next(tile.visit + 1, begin + shape.visits_per_core, 1 - half)

        stream.wait(tile.visit, i, half)
        stream.clear(tile.visit, i, half)
        _score_block(tile, stream, i, half)
        num_done[0] = num_done[0] + 1

    @pl.when(num_blocks > 0)
    def _() -> None:
        _place_rows(tile, scalars)
        tile.sums.total[...] = jnp.zeros_like(tile.sums.total)
        tile.sums.largest[...] = sinks[...]
        tile.sums.weight[...] = jnp.full_like(tile.sums.weight, float(shape.has_sinks))
        jax.lax.fori_loop(0, num_blocks, attend_block, None)
        attended_CTV = tile.sums.total[...] / jnp.maximum(tile.sums.weight[...], 1.0)
        out[0] = jnp.where(places[0] >= 0, attended_CTV, 0.0).astype(out.dtype)

    @pl.when(num_blocks == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)


def _place_rows(tile: Tile, scalars: Scalars) -> None:
    """Spread positions and ancestors of queries over their rows; rows beyond them are padding."""
    shape = tile.shape
    first = tile.visit * shape.tile_queries
    query_T1 = jax.lax.broadcasted_iota(jnp.int32, tile.places.shape[1:], 0) // shape.query_rows
    position_T1, bits_T1 = jnp.full_like(query_T1, -1), jnp.zeros_like(query_T1)
    for query in range(shape.tile_queries):
        position_T1 = jnp.where(query_T1 == query, scalars.positions[first + query], position_T1)
        if shape.is_tree:
            bits_T1 = jnp.where(query_T1 == query, scalars.ancestors[first + query], bits_T1)
    tile.places[0], tile.places[1] = position_T1, bits_T1


def _score_block(tile: Tile, stream: PageStream, block: jax.Array, half: jax.Array) -> None:
    """All rows of a tile against the block in a half of the buffer."""
    shape, first_key = tile.shape, stream.first_key(tile.visit, block)
    root = stream.scalars.positions[jax.lax.div(tile.visit, shape.num_tiles) * shape.num_queries]

    def score(i: jax.Array, carry: None) -> None:
        rows = pl.ds(pl.multiple_of(i * shape.score_rows, shape.score_rows), shape.score_rows)
        keys_S = first_key + jax.lax.broadcasted_iota(jnp.int32, (1, stream.num_keys), 1)
        is_seen_MS = _is_seen(keys_S, tile.places[0, rows], tile.places[1, rows], root, shape)
        for place in range(shape.layout.num_sets):
            _accumulate(tile, place, rows, stream.blocks.at[half], is_seen_MS)

    jax.lax.fori_loop(0, shape.num_rows // shape.score_rows, score, None)


def _is_seen(
    keys_S: jax.Array, position_M1: jax.Array, bits_M1: jax.Array, root: jax.Array, shape: TileShape
) -> jax.Array:
    """Which keys [1, S] each row sees; of a tree, whose first row stands at `root`, its own rows by their bits."""
    is_seen_MS = keys_S <= position_M1
    if shape.config.window:
        is_seen_MS &= keys_S > position_M1 - shape.config.window
    if not shape.is_tree:
        return is_seen_MS
    rows_S = keys_S - root
    is_ancestor_MS = jax.lax.shift_right_logical(bits_M1, jnp.clip(rows_S, 0, 31)) & 1
    return jnp.where(rows_S < 0, is_seen_MS, (is_ancestor_MS == 1) & (rows_S < 32))


def _accumulate(tile: Tile, i: int, rows: Any, block_SX: Any, is_seen_MS: jax.Array) -> None:
    """One set of heads in one step of the online softmax (Milakov and Gimelshein, arXiv:1805.02867)."""
    layout, config, sums = tile.shape.layout, tile.shape.config, tile.sums
    queries_MK = tile.queries[0, i, rows]
    keys, values = layout.lanes_of(i)
    keys_SK, values_SV = (block_SX[:, lanes].astype(queries_MK.dtype) for lanes in (keys, values))
    scores_MS = jax.lax.dot_general(
        queries_MK, keys_SK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    ) * config.scale_for(layout.head_dim)
    if config.soft_cap:
        scores_MS = config.soft_cap * jnp.tanh(scores_MS / config.soft_cap)
    scores_MS = jnp.where(is_seen_MS, scores_MS, MASKED)
    before_M1 = sums.largest[i, rows]
    largest_M1 = jnp.maximum(before_M1, jnp.max(scores_MS, axis=1, keepdims=True))
    weights_MS, shrink_M1 = jnp.exp(scores_MS - largest_M1), jnp.exp(before_M1 - largest_M1)
    sums.largest[i, rows] = largest_M1
    sums.weight[i, rows] = sums.weight[i, rows] * shrink_M1 + jnp.sum(weights_MS, axis=1, keepdims=True)
    added_MV = jnp.dot(weights_MS.astype(queries_MK.dtype), values_SV, preferred_element_type=jnp.float32)
    sums.total[i, rows] = sums.total[i, rows] * shrink_M1 + added_MV
