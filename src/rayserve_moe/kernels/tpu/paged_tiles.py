"""The body of the paged attention kernel: a tile of queries of a block, over the pages within its reach."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.attention import MASKED
from rayserve_moe.kernels.tpu.byte_pairs import lanes_of_block, unit_of
from rayserve_moe.kernels.tpu.packed_rows import LANES
from rayserve_moe.kernels.tpu.paged_choice import TileChoice, words_for
from rayserve_moe.kernels.tpu.paged_sizes import ALIGNED_ROWS, NUM_BUFFERS, TileShape
from rayserve_moe.kernels.tpu.paged_stream import BlockQueue, PageStream, Progress, Reach, Scalars
from rayserve_moe.kernels.tpu.paged_writes import GroupWrites, RowWrites

LOG2_E = math.log2(math.e)
"""Factor from scores to exponents of two, the base of the core's power function."""


class Sums(NamedTuple):
    """The online softmax of a tile."""

    largest: Any
    """Largest score [C, T, L]."""
    weight: Any
    """Sum of weights [C, T, L]."""
    total: Any
    """Sum of weighted values [C, T, V]."""


class Tile(NamedTuple):
    """A tile that is attended."""

    visit: jax.Array
    queries: Any
    """[1, C, T, K]."""
    sums: Sums
    positions: Any
    """Positions of rows [T, L]."""
    shape: TileShape
    choice: TileChoice | None = None
    """None: queries see all tokens within their window."""


class _Opened(NamedTuple):
    """The references of a step of the grid by purpose."""

    stream: PageStream
    progress: Progress
    writes: RowWrites | GroupWrites | None
    tokens: GroupTokens | None
    queries: Any
    sinks: tuple[Any, ...]
    out: Any
    sums: Sums
    positions: Any
    choice: TileChoice | None


def attend_tile(*refs: Any, shape: TileShape) -> None:
    """Attend the tile of a step of the grid.

    `refs` are scalars, queries, sinks [C, T, 1], new rows and chosen tokens if any, the pool, the output [1, C, T, V],
    the pool again if it is written; buffers for blocks of the pool, `Sums`, positions of rows, `Progress`, and a
    semaphore of each buffer; the other fields of `RowWrites`, or the words of `TileChoice`. If the shape `is_grouped`,
    queries and output are fields of `GroupTokens`, and the other fields of `GroupWrites` and `GroupTokens` come last.
    """
    stream, progress, writes, tokens, queries, sinks, out, sums, positions, choice = _open(refs, shape)
    copies = [each for each in (writes, tokens) if each]
    num_visits = pl.num_programs(1) if tokens else shape.visits_per_core
    begin = pl.program_id(0) * num_visits
    tile = Tile(begin + pl.program_id(1), queries, sums, positions, shape, choice)
    reach = stream.reach_of(tile.visit)
    num_blocks, queue = stream.num_blocks(reach), BlockQueue(stream, progress, begin + num_visits)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        for each in copies:
            each.begin()
        queue.begin(begin)

    queue.fill(jnp.where(pl.program_id(1) == 0, NUM_BUFFERS, 0))

    def attend_block(i: jax.Array, carry: None) -> None:
        buffer = queue.buffer
        queue.advance()
        stream.wait(reach, i, buffer)
        _put_rows(writes, stream, reach, i, buffer=buffer, shape=shape)
        stream.clear(reach, i, buffer)
        _score_block(tile, stream, stream.first_key(reach, i), buffer)
        progress.num_done[0] = progress.num_done[0] + 1

    @pl.when(num_blocks > 0)
    def _() -> None:
        if tokens:
            tokens.lay_out(stream.scalars.starts[tile.visit])
        if choice:
            choice.mark(tile.visit)
        _place_rows(tile, stream.scalars)
        begin_sums(sums, sinks)
        jax.lax.fori_loop(0, num_blocks, attend_block, None)
        _store(tile, tokens, stream.scalars, out)

    if tokens is None:
        pl.when(num_blocks == 0)(lambda: _clear(out))
    for each in copies:
        pl.when(pl.program_id(1) + 1 == num_visits)(each.wait)


def begin_sums(sums: Sums, sinks: tuple[Any, ...] = ()) -> None:
    """Reset the sums of a tile, which has seen nothing, or its sinks."""
    sums.total[...] = jnp.zeros_like(sums.total)
    largest = sinks[0][...] * LOG2_E if sinks else MASKED
    sums.largest[...] = jnp.broadcast_to(largest, sums.largest.shape)
    sums.weight[...] = jnp.full_like(sums.weight, float(bool(sinks)))


def _clear(out: Any) -> None:
    out[...] = jnp.zeros_like(out)


def _put_rows(
    writes: RowWrites | GroupWrites | None,
    stream: PageStream,
    reach: Reach,
    block: jax.Array,
    *,
    buffer: jax.Array,
    shape: TileShape,
) -> None:
    """Put a visit's new rows into their block, if they are written; the row of a lone token is in the last block."""
    if isinstance(writes, GroupWrites):
        writes.put(stream, reach, block, buffer, layout=shape.layout)
    elif writes:
        is_last = block + 1 == stream.num_blocks(reach)
        pl.when(is_last)(lambda: writes.put(stream, reach.visit, reach, block, buffer))


def tile_scratch(kv_pages: jax.Array, shape: TileShape) -> list[Any]:
    """Return buffers for blocks of the pool, sums, positions of rows, `Progress`, semaphores, words of a choice."""
    widths = (LANES, LANES, shape.layout.value_lanes)
    num_words = words_for(shape.table_width * shape.page_size)
    num_choices = shape.choice_sets * shape.tile_queries
    words = [pltpu.VMEM((num_choices, num_words, LANES), jnp.int32)] if shape.has_choice else []
    return [
        pltpu.VMEM((NUM_BUFFERS, shape.num_keys, kv_pages.shape[2]), kv_pages.dtype),
        *(pltpu.VMEM((shape.layout.num_sets, shape.num_rows, width), jnp.float32) for width in widths),
        pltpu.VMEM((shape.num_rows, LANES), jnp.int32),
        *[pltpu.SMEM((1,), jnp.int32)] * len(Progress._fields),
        pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
        *words,
    ]


def sink_rows(sinks_H: jax.Array | None, shape: TileShape) -> list[jax.Array]:
    """Return the first largest score of each row of a tile, its head's sink: float32 [C, T, 1], if any."""
    if sinks_H is None:
        return []
    sinks_CR = sinks_H.astype(jnp.float32).reshape(shape.layout.num_sets, -1)
    sinks_CR = jnp.pad(sinks_CR, ((0, 0), (0, shape.query_rows - sinks_CR.shape[1])))
    sinks_CT = jnp.tile(sinks_CR, (1, shape.tile_queries))
    return [jnp.pad(sinks_CT, ((0, 0), (0, shape.num_rows - sinks_CT.shape[1])))[..., None]]


def _open(refs: tuple[Any, ...], shape: TileShape) -> _Opened:
    num_scalars, see_all = len(Scalars._fields) if shape.is_grouped else len(Scalars._fields) - 3, None
    scalars, refs = Scalars(*refs[:num_scalars]), refs[num_scalars:]
    if shape.has_choice:
        see_all, refs = refs[0], refs[1:]
    num_given = 2 + shape.has_sinks + shape.has_new_rows + shape.has_choice
    (queries, *knobs, pool), (out, *rest) = refs[:num_given], refs[num_given:]
    chosen = knobs.pop() if shape.has_choice else None
    sinks, rows = tuple(knobs[: shape.has_sinks]), knobs[shape.has_sinks :]
    if rows:
        pool, *rest = rest
    (blocks, *sums, positions), rest = rest[:5], rest[5:]
    (*progress, arrivals), rest = rest[:4], rest[4:]
    if not rows:
        scalars = scalars._replace(first_page=None)
    stream = PageStream(
        scalars, pool, blocks, arrivals, shape.num_tiles, shape.table_width, shape.num_pages, shape.page_size
    )
    opened = partial(_Opened, stream, Progress(*progress))
    if shape.is_grouped:
        tokens = GroupTokens(queries, rest[3], out, *rest[4:])
        writes = GroupWrites(*rows, *rest[:3])
        return opened(writes, tokens, tokens.tile, sinks, out, Sums(*sums), positions, None)
    writes = RowWrites(*rows, *rest) if rows else None
    choice = TileChoice(see_all, chosen, rest[0], bool(shape.block_size)) if shape.has_choice else None
    return opened(writes, None, queries, sinks, out, Sums(*sums), positions, choice)


def _place_rows(tile: Tile, scalars: Scalars) -> None:
    """Spread positions of queries over their rows; rows beyond them are padding."""
    shape = tile.shape
    query_TL = jax.lax.broadcasted_iota(jnp.int32, tile.positions.shape, 0) // shape.query_rows
    position_TL = jnp.full_like(query_TL, -1)
    if shape.is_grouped:
        first, count = scalars.starts[tile.visit], scalars.counts[tile.visit]

        def place(query: jax.Array, placed_TL: jax.Array) -> jax.Array:
            return jnp.where(query_TL == query, scalars.positions[first + query], placed_TL)

        tile.positions[...] = jax.lax.fori_loop(0, count, place, position_TL)
        return
    first = tile.visit * shape.tile_queries
    for query in range(shape.tile_queries):
        position_TL = jnp.where(query_TL == query, scalars.positions[first + query], position_TL)
    tile.positions[...] = position_TL


def _store(tile: Tile, tokens: GroupTokens | None, scalars: Scalars, out: Any) -> None:
    """Write weighted means of values to the output [1, C, T, V], zeros for padding; a group's go to its tokens."""
    if tokens:
        tokens.write(tile.sums, scalars.starts[tile.visit], scalars.counts[tile.visit])
        return
    position_TV = _wide(tile.positions[...], out.shape[3])
    for i in range(tile.shape.layout.num_sets):
        attended_TV = tile.sums.total[i] / jnp.maximum(_wide(tile.sums.weight[i], out.shape[3]), 1.0)
        out[0, i] = jnp.where(position_TV >= 0, attended_TV, 0.0).astype(out.dtype)


def _score_block(tile: Tile, stream: PageStream, first_key: jax.Array, buffer: jax.Array) -> None:
    """Attend all rows of a tile to the block in a buffer, with the first key `first_key`."""
    shape = tile.shape

    def score(i: jax.Array, carry: None, *, num_rows: int = shape.score_rows) -> None:
        rows, at_once = pl.ds(pl.multiple_of(i * num_rows, num_rows), num_rows), shape.sets_at_once(num_rows)
        position_MS = _wide(tile.positions[rows], stream.num_keys)
        keys_S = first_key + jax.lax.broadcasted_iota(jnp.int32, (1, stream.num_keys), 1)
        for first in range(0, shape.layout.num_sets, at_once):
            sets, keys = range(first, min(first + at_once, shape.layout.num_sets)), keys_S
            if tile.choice:
                num_queries = num_rows // shape.query_rows
                first_query = first * shape.tile_queries + i * num_queries
                sizes = num_queries, shape.query_rows, stream.num_keys
                keys = tile.choice.keys_of_rows(first_query, first_key, shape=sizes)
            accumulate(tile, sets, rows, stream.blocks.at[buffer], _is_seen(keys, position_MS, shape))

    num_chunks, num_real = shape.num_rows // shape.score_rows, None
    if shape.is_grouped:
        num_real = stream.scalars.counts[tile.visit] * shape.query_rows
        num_chunks = pl.cdiv(num_real, shape.score_rows) if num_chunks > 1 else 1
    if num_real is None or shape.few_rows == shape.score_rows:
        jax.lax.fori_loop(0, num_chunks, score, None)
    else:
        pl.when(num_real <= shape.few_rows)(lambda: score(jnp.int32(0), None, num_rows=shape.few_rows))
        pl.when(num_real > shape.few_rows)(lambda: jax.lax.fori_loop(0, num_chunks, score, None))


def _is_seen(keys: jax.Array, position_MS: jax.Array, shape: TileShape) -> jax.Array:
    """Return bool [M, S]: True if a row sees a key of [1, S], or of its own [M, S]."""
    is_seen_MS = keys <= position_MS
    if shape.config.window:
        is_seen_MS &= keys > position_MS - shape.config.window
    return is_seen_MS


def accumulate(tile: Tile, sets: range, rows: Any, block_SX: Any, is_seen_MS: jax.Array) -> None:
    """Take a step of the online softmax (Milakov and Gimelshein, arXiv:1805.02867) for some sets of heads.

    Each part runs for all sets, so that no set waits for the matrix unit's result of another.
    """
    layout, config, sums = tile.shape.layout, tile.shape.config, tile.sums
    unit = unit_of(block_SX.dtype)
    scale = config.scale_for(layout.head_dim) * unit
    scores, weights = {}, {}
    for i in sets:
        queries_MK = tile.queries[0, i, rows]
        keys_SK = lanes_of_block(block_SX, layout.lanes_of(i)[0], queries_MK.dtype)
        scores_MS = jax.lax.dot_general(
            queries_MK, keys_SK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
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
        values_SV = lanes_of_block(block_SX, layout.lanes_of(i)[1], weights_MS.dtype)
        added_MV = jnp.dot(weights_MS, values_SV, preferred_element_type=jnp.float32) * unit
        sums.total[i, rows] = sums.total[i, rows] * _wide(shrink_ML, added_MV.shape[1]) + added_MV


def _wide(same_ML: jax.Array, width: int) -> jax.Array:
    """Return values that are equal in all lanes, in `width` lanes [M, width]; whole registers need no move."""
    num_rows, lanes = same_ML.shape
    if width % lanes:
        return jnp.broadcast_to(same_ML[:, :1], (num_rows, width))
    return jnp.tile(same_ML, (1, width // lanes))


def first_given(start: jax.Array, num_tokens: int, num_given: int) -> jax.Array:
    """Return the first of `num_given` tokens whose queries a group gets; the group begins at token `start`."""
    return jnp.minimum(start, num_tokens - num_given)


@dataclass(frozen=True)
class GroupTokens:
    """References of a group's tokens: their queries, and the way of their results to HBM."""

    given: Any
    """Queries [Q, C, R, K] of a group and its neighbours (`first_given`)."""
    tile: Any
    """The tile [1, C, T, K] of these queries."""
    out: Any
    """Attended values [U, C, R, V] of all tokens in HBM."""
    staged: Any
    """Slots [Q, C, R, V] from which values are copied to `out`."""
    num_used: Any
    """Number of slots in use [1]."""
    done: Any
    """Semaphore of the copies."""

    def begin(self) -> None:
        """Reset the number of slots in use, and set all rows of the tile to zero."""
        self.num_used[0] = 0
        self.tile[...] = jnp.zeros_like(self.tile)

    def lay_out(self, start: jax.Array) -> None:
        """Put the rows of the queries from token `start` on below each other into the tile.

        Rows of tokens beyond the group are ignored.
        """
        num_given, num_sets, num_rows, _ = self.given.shape
        num_queries, num_ahead = self.staged.shape[0], start - first_given(start, self.out.shape[0], num_given)
        at_once = 1 if num_rows % ALIGNED_ROWS == 0 else 2
        for i, first in product(range(num_sets), range(0, num_queries, at_once)):
            queries = range(first, min(first + at_once, num_queries))
            places = [jnp.minimum(num_ahead + query, num_given - 1) for query in queries]
            given_RK = jnp.concatenate([self.given[place, i].astype(jnp.float32) for place in places], axis=0)
            rows = pl.ds(first * num_rows, len(queries) * num_rows)
            self.tile[0, i, rows] = given_RK.astype(self.tile.dtype)

    def write(self, sums: Any, start: jax.Array, count: jax.Array) -> None:
        """Write the weighted means of values of `count` tokens from token `start` on."""
        self.wait()
        _, num_sets, num_rows, lanes = self.staged.shape

        def write_one(query: jax.Array, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(query * num_rows, num_rows), num_rows)
            for i in range(num_sets):
                weight_R1 = jnp.maximum(sums.weight[i, rows][:, :1], 1.0)
                attended_RV = sums.total[i, rows] / jnp.broadcast_to(weight_R1, (num_rows, lanes))
                self.staged[query, i] = attended_RV.astype(self.staged.dtype)
            pltpu.make_async_copy(self.staged.at[query], self.out.at[start + query], self.done).start()

        jax.lax.fori_loop(0, count, write_one, None)
        self.num_used[0] = count

    def wait(self) -> None:
        """Wait until all staged values are in `out`."""

        def wait_for_one(_: jax.Array, carry: None) -> None:
            pltpu.make_async_copy(self.staged.at[0], self.staged.at[0], self.done).wait()

        jax.lax.fori_loop(0, self.num_used[0], wait_for_one, None)
        self.num_used[0] = 0
