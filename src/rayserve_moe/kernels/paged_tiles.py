"""The body of the paged attention kernel: one tile of queries of one block, over the pages within its reach."""

# T rows of a tile: queries * R, padded   R query heads of a set   M rows that are scored at once   C sets
# L lanes of a register   K lanes of keys   V lanes of values   S key positions of a block   X lanes of a row

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rayserve_moe.kernels.attention_reference import MASKED
from rayserve_moe.kernels.paged_sizes import TileShape
from rayserve_moe.kernels.paged_stream import PageStream, Scalars
from rayserve_moe.kernels.paged_writes import RowWrites

LOG2_E = math.log2(math.e)
"""Scores are kept as exponents of two, which is what the core raises."""


class Sums(NamedTuple):
    """The online softmax of a tile: largest score and sum of weights [C, T, L], weighted values [C, T, V]."""

    largest: Any
    weight: Any
    total: Any


class Tile(NamedTuple):
    """A tile that is attended: its visit, queries [1, C, T, K], sums, and positions and ancestors of rows [2, T, L]."""

    visit: jax.Array
    queries: Any
    sums: Sums
    places: Any
    shape: TileShape


class _Opened(NamedTuple):
    """The references of a step of the grid by what they are for."""

    stream: PageStream
    writes: RowWrites | None
    queries: Any
    sinks: tuple[Any, ...]
    out: Any
    sums: Sums
    places: Any
    num_done: Any


def attend_tile(*refs: Any, shape: TileShape) -> None:
    """A step of the grid. `refs` are scalars, queries, sinks [C, T, 1] and new rows if any, the pool, the output
    [1, C, T, V], the pool again if it is written; two blocks of the pool, `Sums`, places of rows, the number of blocks
    so far, and a semaphore of each block; the rest of `RowWrites`."""
    stream, writes, queries, sinks, out, sums, places, num_done = _open(refs, shape)
    begin = pl.program_id(0) * shape.visits_per_core
    tile = Tile(begin + pl.program_id(1), queries, sums, places, shape)
    reach = stream.reach_of(tile.visit)
    num_blocks = stream.num_blocks(reach)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        num_done[0] = 0
        if writes:
            writes.is_used[0] = 0
        stream.blocks[...] = jnp.zeros_like(stream.blocks)
        stream.start_next(begin, begin + shape.visits_per_core, jnp.int32(0))

    def attend_block(i: jax.Array, carry: None) -> None:
        half = jax.lax.rem(num_done[0], 2)

        pl.when(i + 1 < num_blocks)(lambda: stream.start(reach, i + 1, 1 - half))

        @pl.when(i + 1 == num_blocks)
        def _() -> None:
            stream.start_next(tile.visit + 1, begin + shape.visits_per_core, 1 - half)

        stream.wait(reach, i, half)
        if writes:
            pl.when(i + 1 == num_blocks)(lambda: writes.put(stream, tile.visit, reach, i, half))
        stream.clear(reach, i, half, is_node=shape.is_tree and shape.num_queries == 1)
        _score_block(tile, stream, stream.first_key(reach, i), half)
        num_done[0] = num_done[0] + 1

    @pl.when(num_blocks > 0)
    def _() -> None:
        _place_rows(tile, stream.scalars)
        tile.sums.total[...] = jnp.zeros_like(tile.sums.total)
        largest = sinks[0][...] * LOG2_E if sinks else MASKED
        tile.sums.largest[...] = jnp.broadcast_to(largest, tile.sums.largest.shape)
        tile.sums.weight[...] = jnp.full_like(tile.sums.weight, float(shape.has_sinks))
        jax.lax.fori_loop(0, num_blocks, attend_block, None)
        _store(tile, out)

    @pl.when(num_blocks == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    if writes:
        pl.when(pl.program_id(1) + 1 == shape.visits_per_core)(writes.wait)


def _open(refs: tuple[Any, ...], shape: TileShape) -> _Opened:
    num_scalars = len(Scalars._fields) - (not shape.is_tree)
    scalars, refs = Scalars(*refs[:num_scalars]), refs[num_scalars:]
    num_given = 2 + shape.has_sinks + shape.has_new_rows
    (queries, *knobs, pool), (out, *rest) = refs[:num_given], refs[num_given:]
    sinks, rows = tuple(knobs[: shape.has_sinks]), knobs[shape.has_sinks :]
    if rows:
        pool, *rest = rest
    blocks, *sums, places, num_done, arrivals = rest[:7]
    if not rows:
        scalars = scalars._replace(first_page=None)
    stream = PageStream(
        scalars, pool, blocks, arrivals, shape.num_tiles, shape.table_width, shape.num_pages, shape.page_size
    )
    writes = RowWrites(*rows, *rest[7:]) if rows else None
    return _Opened(stream, writes, queries, sinks, out, Sums(*sums), places, num_done)


def _place_rows(tile: Tile, scalars: Scalars) -> None:
    """Spread positions and ancestors of queries over their rows; rows beyond them are padding."""
    shape = tile.shape
    first = tile.visit * shape.tile_queries
    query_TL = jax.lax.broadcasted_iota(jnp.int32, tile.places.shape[1:], 0) // shape.query_rows
    position_TL, bits_TL = jnp.full_like(query_TL, -1), jnp.zeros_like(query_TL)
    for query in range(shape.tile_queries):
        position_TL = jnp.where(query_TL == query, scalars.positions[first + query], position_TL)
        if shape.is_tree:
            bits_TL = jnp.where(query_TL == query, scalars.ancestors[first + query], bits_TL)
    tile.places[0], tile.places[1] = position_TL, bits_TL


def _store(tile: Tile, out: Any) -> None:
    """Weighted means of values into the output [1, C, T, V]; zeros for padding."""
    position_TV = _wide(tile.places[0], out.shape[3])
    for i in range(tile.shape.layout.num_sets):
        attended_TV = tile.sums.total[i] / jnp.maximum(_wide(tile.sums.weight[i], out.shape[3]), 1.0)
        out[0, i] = jnp.where(position_TV >= 0, attended_TV, 0.0).astype(out.dtype)


def _score_block(tile: Tile, stream: PageStream, first_key: jax.Array, half: jax.Array) -> None:
    """All rows of a tile against the block in a half of the buffer, whose keys stand from `first_key` on."""
    shape = tile.shape
    root = stream.scalars.positions[jax.lax.div(tile.visit, shape.num_tiles) * shape.num_queries]
    if shape.is_tree:
        root = stream.scalars.roots[jax.lax.div(tile.visit, shape.num_tiles)]

    def score(i: jax.Array, carry: None) -> None:
        rows = pl.ds(pl.multiple_of(i * shape.score_rows, shape.score_rows), shape.score_rows)
        keys_S = first_key + jax.lax.broadcasted_iota(jnp.int32, (1, stream.num_keys), 1)
        places = (_wide(tile.places[i, rows], stream.num_keys) for i in (0, 1))
        is_seen_MS = _is_seen(keys_S, *places, root, shape)
        for first in range(0, shape.layout.num_sets, shape.sets_at_once):
            sets = range(first, min(first + shape.sets_at_once, shape.layout.num_sets))
            _accumulate(tile, sets, rows, stream.blocks.at[half], is_seen_MS)

    jax.lax.fori_loop(0, shape.num_rows // shape.score_rows, score, None)


def _is_seen(
    keys_S: jax.Array, position_MS: jax.Array, bits_MS: jax.Array, root: jax.Array, shape: TileShape
) -> jax.Array:
    """Which keys [1, S] each row sees; of a tree, which begins at `root`, those of its nodes by their bits."""
    is_seen_MS = keys_S <= position_MS
    if shape.config.window:
        is_seen_MS &= keys_S > position_MS - shape.config.window
    if not shape.is_tree:
        return is_seen_MS
    rows_MS = jnp.broadcast_to(keys_S - root, bits_MS.shape)
    is_ancestor_MS = (jax.lax.shift_right_logical(bits_MS, jnp.clip(rows_MS, 0, 31)) & 1) == 1
    return ((rows_MS < 0) & is_seen_MS) | ((rows_MS >= 0) & (rows_MS < 32) & is_ancestor_MS)


def _accumulate(tile: Tile, sets: range, rows: Any, block_SX: Any, is_seen_MS: jax.Array) -> None:
    """Some sets of heads in one step of the online softmax (Milakov and Gimelshein, arXiv:1805.02867).

    Each part is done for all of them, so that none waits for what the matrix unit makes of another one.
    """
    layout, config, sums = tile.shape.layout, tile.shape.config, tile.sums
    scores, weights = {}, {}
    for i in sets:
        queries_MK = tile.queries[0, i, rows]
        keys_SK = block_SX[:, layout.lanes_of(i)[0]].astype(queries_MK.dtype)
        scores_MS = jax.lax.dot_general(
            queries_MK, keys_SK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scale = config.scale_for(layout.head_dim)
        if config.soft_cap:
            scores_MS = config.soft_cap * LOG2_E * jnp.tanh(scores_MS * (scale / config.soft_cap))
        else:
            scores_MS = scores_MS * (scale * LOG2_E)
        scores[i] = jnp.where(is_seen_MS, scores_MS, MASKED)
    for i in sets:
        before_ML = sums.largest[i, rows]
        largest_ML = jnp.maximum(before_ML, jnp.max(scores[i], axis=1, keepdims=True))
        weights_MS = jnp.exp2(scores[i] - _wide(largest_ML, scores[i].shape[1]))
        shrink_ML = jnp.exp2(before_ML - largest_ML)
        sums.largest[i, rows] = largest_ML
        sums.weight[i, rows] = sums.weight[i, rows] * shrink_ML + jnp.sum(weights_MS, axis=1, keepdims=True)
        weights[i] = weights_MS.astype(tile.queries.dtype), shrink_ML
    for i in sets:
        weights_MS, shrink_ML = weights[i]
        values_SV = block_SX[:, layout.lanes_of(i)[1]].astype(weights_MS.dtype)
        added_MV = jnp.dot(weights_MS, values_SV, preferred_element_type=jnp.float32)
        sums.total[i, rows] = sums.total[i, rows] * _wide(shrink_ML, added_MV.shape[1]) + added_MV


def _wide(same_ML: jax.Array, width: int) -> jax.Array:
    """What is the same in all lanes, in `width` of them: without a move where those are whole registers."""
    num_rows, lanes = same_ML.shape
    if width % lanes:
        return jnp.broadcast_to(same_ML[:, :1], (num_rows, width))
    return jnp.tile(same_ML, (1, width // lanes))
