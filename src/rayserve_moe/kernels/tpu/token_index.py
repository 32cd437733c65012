"""The index of sparse attention in one TPU kernel: scores of all keys of a sequence, then the choice of the best.

Pages of keys are copied into the core's memory a block at a time while the previous block is scored. Scores stay there
until `top_tokens` has chosen. The scores of a query, and so its choice, do not depend on other queries of a call.
"""

# B query blocks   Q queries of a visit   A index heads, padded   d lanes of a key   M queries scored at once * A
# S key positions scored at once   R rows of scores   L lanes, 128   P page-table width   K chosen tokens

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces
from rayserve_moe.kernels.reference.token_index import NONE, every_token
from rayserve_moe.kernels.tpu.packed_rows import LANES
from rayserve_moe.kernels.tpu.paged_attention import cores_for, for_cores, visits_of
from rayserve_moe.kernels.tpu.paged_sizes import VMEM_BYTES, parts_of
from rayserve_moe.kernels.tpu.paged_stream import PageStream, Scalars
from rayserve_moe.kernels.tpu.top_tokens import (
    CHUNK_POSITIONS,
    CHUNK_ROWS,
    COUNTERS,
    UNSEEN,
    TopTokens,
    kept_lanes,
    ordered,
)

ALIGNED_HEADS = 16
"""Divisor of the padded number of heads: rows of whole registers of 16-bit numbers."""
BLOCK_KEYS, SCORE_KEYS, SCORE_ROWS = 2048, 512, 256
"""Maximum keys of a block and keys scored at once; maximum rows of queries scored at once."""
SCORE_BYTES = 16 << 20
"""Maximum bytes of the scores of a visit."""


@dataclass(frozen=True)
class IndexShape:
    """The sizes of a call: visits of `num_queries` queries, each with `num_heads` rows."""

    num_cores: int
    visits_per_core: int
    num_tiles: int
    """Visits of a block of queries."""
    num_queries: int
    num_heads: int
    table_width: int
    page_size: int
    num_pages: int
    """Pages of a block of keys."""
    top_k: int

    @property
    def block_keys(self) -> int:
        """Return the keys of a block, whole rows of scores."""
        return self.num_pages * self.page_size

    @property
    def score_keys(self) -> int:
        """Return S, which divides a block."""
        return math.gcd(self.block_keys, SCORE_KEYS)

    @property
    def queries_at_once(self) -> int:
        """Return the queries that are scored at once."""
        return queries_at_once(self.num_queries, self.num_heads)

    @property
    def num_chunks(self) -> int:
        """Return the chunks of rows that hold the scores of whole blocks."""
        return -(-(self.table_width * self.page_size + self.block_keys) // CHUNK_POSITIONS)


def choose_tokens(
    queries_BQAd: jax.Array,
    weights_BQA: jax.Array,
    key_pages: jax.Array,
    places: BlockPlaces,
    *,
    top_k: int,
    interpret: Any = False,
) -> jax.Array:
    """Choose tokens as `reference.token_index.choose_tokens` does, over a pool [N, page, X] of `packed_latents`.

    `interpret` (see `pallas_call`) runs it without a TPU.
    """
    num_blocks, num_queries, num_heads, _ = queries_BQAd.shape
    table_width, page_size = places.page_table_BP.shape[1], key_pages.shape[1]
    count = min(top_k, table_width * page_size)
    if count == table_width * page_size:
        return every_token(places.positions_BQ, count)
    more_heads, more_lanes = -num_heads % ALIGNED_HEADS, key_pages.shape[2] - queries_BQAd.shape[3]
    queries_BQAd = jnp.pad(queries_BQAd, ((0, 0), (0, 0), (0, more_heads), (0, more_lanes))).astype(key_pages.dtype)
    weights_BQA = jnp.pad(weights_BQA, ((0, 0), (0, 0), (0, more_heads)))
    chosen = []
    for part in parts_of(num_blocks, table_width):
        shape = _shape_of(queries_BQAd[part], key_pages, table_width, top_k=count, interpret=interpret)
        of_part = BlockPlaces(places.page_table_BP[part], places.positions_BQ[part])
        chosen_WQK = _call(queries_BQAd[part], weights_BQA[part], key_pages, of_part, shape=shape, interpret=interpret)
        chosen.append(chosen_WQK.reshape(-1, num_queries, chosen_WQK.shape[-1])[: part.stop - part.start])
    return (jnp.concatenate(chosen) if len(chosen) > 1 else chosen[0])[..., :count]


def unsupported_reason(
    queries_BQAd: jax.Array, _: jax.Array, key_pages: jax.Array, places: BlockPlaces, **__: Any
) -> str:
    """Return why the kernel does not take a call; empty if it does."""
    num_heads, num_tokens = queries_BQAd.shape[2], places.page_table_BP.shape[1] * key_pages.shape[1]
    if num_heads > LANES:
        return f"an index of {num_heads} heads, not {LANES} or fewer"
    if 4 * num_tokens > SCORE_BYTES:
        return f"the scores of {num_tokens} tokens exceed {SCORE_BYTES >> 20} MiB"
    return ""


def queries_at_once(num_queries: int, num_heads: int) -> int:
    """Return the queries of a visit that are scored at once."""
    return math.gcd(num_queries, max(1, SCORE_ROWS // num_heads))


def pages_of_a_block(page_size: int) -> int:
    """Return the number of pages of a block of keys, which are whole rows of scores."""
    unit = LANES // math.gcd(page_size, LANES)
    return max(1, BLOCK_KEYS // page_size // unit) * unit


def _shape_of(
    queries_BQAd: jax.Array, key_pages: jax.Array, table_width: int, *, top_k: int, interpret: Any
) -> IndexShape:
    num_blocks, num_queries, num_heads, _ = queries_BQAd.shape
    page_size = key_pages.shape[1]
    most = max(1, SCORE_BYTES // (4 * table_width * page_size))
    tile_queries = max(size for size in range(1, num_queries + 1) if num_queries % size == 0 and size <= most)
    num_cores, num_tiles = cores_for(num_blocks, interpret), num_queries // tile_queries
    return IndexShape(
        num_cores,
        -(-num_blocks // num_cores) * num_tiles,
        num_tiles=num_tiles,
        num_queries=tile_queries,
        num_heads=num_heads,
        table_width=table_width,
        page_size=page_size,
        num_pages=pages_of_a_block(page_size),
        top_k=top_k,
    )


def _call(
    queries_BQAd: jax.Array,
    weights_BQA: jax.Array,
    key_pages: jax.Array,
    places: BlockPlaces,
    *,
    shape: IndexShape,
    interpret: Any,
) -> jax.Array:
    """Choose the tokens of blocks with page ids that fit into scalar memory: [visits, queries of a visit, lanes]."""
    table_BP, positions_BQ, queries_BQAd, weights_BQA = (
        for_cores(array, shape.num_cores, fill=fill)
        for array, fill in ((places.page_table_BP, 0), (places.positions_BQ, -1), (queries_BQAd, 0), (weights_BQA, 0))
    )
    num_visits, width = shape.num_cores * shape.visits_per_core, queries_BQAd.shape[-1]
    # Queries that see `top_k` tokens or fewer choose all of them, and read no key.
    read_BQ = jnp.where(positions_BQ < shape.top_k, -1, positions_BQ)
    visits = visits_of(read_BQ, FULL_CAUSAL, tile_queries=shape.num_queries)
    scalars = [array.reshape(-1) for array in (table_BP, *visits, positions_BQ)]
    queries_WMd = queries_BQAd.reshape(num_visits, shape.num_queries * shape.num_heads, width)
    weights_WQA = weights_BQA.astype(jnp.float32).reshape(num_visits, shape.num_queries, shape.num_heads)
    if not interpret:
        # XLA may otherwise bring a pool that fits into the core's memory there.
        key_pages = pltpu.with_memory_space_constraint(key_pages, pltpu.HBM)
    of_row = pltpu.VMEM((shape.num_chunks * CHUNK_ROWS, LANES), jnp.float32)
    return pl.pallas_call(
        partial(_choose, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.num_cores, shape.visits_per_core),
            in_specs=[
                _visit(queries_WMd.shape[1:], shape),
                _visit(weights_WQA.shape[1:], shape),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=_visit((shape.num_queries, kept_lanes(shape.top_k)), shape),
            scratch_shapes=[
                pltpu.VMEM((2, shape.block_keys, key_pages.shape[2]), key_pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((shape.num_queries, shape.num_chunks * CHUNK_ROWS, LANES), jnp.int32),
                pltpu.VMEM((shape.num_queries * shape.num_heads, LANES), jnp.float32),
                of_row,
                of_row,
                pltpu.VMEM((shape.num_chunks, LANES + COUNTERS, CHUNK_ROWS), jnp.bfloat16),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_visits, shape.num_queries, kept_lanes(shape.top_k)), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name="token_index",
        interpret=interpret,
    )(*scalars, queries_WMd, weights_WQA, key_pages)


def _visit(sizes: tuple[int, ...], shape: IndexShape) -> pl.BlockSpec:
    """Return the block spec of a visit's part of an array."""
    return pl.BlockSpec((1, *sizes), lambda core, step, *_: (core * shape.visits_per_core + step, 0, 0))


@dataclass(frozen=True)
class _Visit:
    """A visit's queries and their scores."""

    number: jax.Array
    queries: Any
    """[1, Q * A, d]."""
    factors: Any
    """Weights of heads [Q * A, L], the same in all lanes."""
    scores: Any
    """Ordered scores by position [Q, R, L], `UNSEEN` after the query's own."""
    stream: PageStream
    shape: IndexShape

    def position_of(self, query: jax.Array | int) -> jax.Array:
        """Return the position of a query; -1 for padding."""
        return self.stream.scalars.positions[self.number * self.shape.num_queries + query]


def _choose(*refs: Any, shape: IndexShape) -> None:
    """Choose the tokens of the queries of a step of the grid."""
    scalars, refs = Scalars(None, *refs[:5]), refs[5:]
    queries, weights, pool, out, blocks, arrivals, num_done, scores, factors, *of_rows = refs
    stream = PageStream(
        scalars, pool, blocks, arrivals, shape.num_tiles, shape.table_width, shape.num_pages, shape.page_size
    )
    begin = pl.program_id(0) * shape.visits_per_core
    end = begin + shape.visits_per_core
    visit = _Visit(begin + pl.program_id(1), queries, factors, scores, stream, shape)
    reach = stream.reach_of(visit.number)
    num_blocks = stream.num_blocks(reach)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        num_done[0] = 0
        stream.start_next(begin, end, jnp.int32(0))

    def score_block(i: jax.Array, carry: None) -> None:
        half = jax.lax.rem(num_done[0], 2)
        pl.when(i + 1 < num_blocks)(lambda: stream.start(reach, i + 1, 1 - half))
        pl.when(i + 1 == num_blocks)(lambda: stream.start_next(visit.number + 1, end, 1 - half))
        stream.wait(reach, i, half)
        _score_block(visit, stream.first_key(reach, i), reach.end, half)
        num_done[0] = num_done[0] + 1

    @pl.when(num_blocks > 0)
    def _() -> None:
        _spread_weights(weights, factors, shape)
        _forget(scores, pl.cdiv(reach.end, CHUNK_POSITIONS))
        jax.lax.fori_loop(0, num_blocks, score_block, None)

    def choose(query: jax.Array, carry: None) -> None:
        position, out_K = visit.position_of(query), out.at[0, pl.ds(query, 1)]

        @pl.when(position < shape.top_k)
        def _() -> None:
            number_K = jax.lax.broadcasted_iota(jnp.int32, out_K.shape, 1)
            out_K[...] = jnp.where(number_K <= position, number_K, NONE)

        @pl.when(position >= shape.top_k)
        def _() -> None:
            TopTokens(*of_rows).choose(
                scores.at[query], pl.cdiv(position + 1, CHUNK_POSITIONS), out_K, top_k=shape.top_k
            )

    jax.lax.fori_loop(0, shape.num_queries, choose, None)


def _spread_weights(weights: Any, factors: Any, shape: IndexShape) -> None:
    """Spread the weights of heads, which lie in lanes, over rows."""
    sizes = shape.num_heads, shape.num_heads
    is_own_AA = jax.lax.broadcasted_iota(jnp.int32, sizes, 0) == jax.lax.broadcasted_iota(jnp.int32, sizes, 1)

    def spread(query: jax.Array, carry: None) -> None:
        of_query_AA = jnp.broadcast_to(weights[0, pl.ds(query, 1)], sizes)
        weight_A1 = jnp.sum(jnp.where(is_own_AA, of_query_AA, 0.0), axis=1, keepdims=True)
        rows = pl.ds(pl.multiple_of(query * shape.num_heads, shape.num_heads), shape.num_heads)
        factors[rows] = jnp.broadcast_to(weight_A1, (shape.num_heads, LANES))

    jax.lax.fori_loop(0, shape.num_queries, spread, None)


def _forget(scores: Any, num_chunks: jax.Array) -> None:
    """Mark the scores of the first chunks as unseen."""

    def forget(i: jax.Array, carry: None) -> None:
        query, chunk = jax.lax.div(i, num_chunks), jax.lax.rem(i, num_chunks)
        rows = pl.ds(pl.multiple_of(chunk * CHUNK_ROWS, CHUNK_ROWS), CHUNK_ROWS)
        scores[query, rows] = jnp.full((CHUNK_ROWS, LANES), UNSEEN, jnp.int32)

    jax.lax.fori_loop(0, scores.shape[0] * num_chunks, forget, None)


def _score_block(visit: _Visit, first_key: jax.Array, end: jax.Array, half: jax.Array) -> None:
    """Score the keys of a block, `first_key` and the following ahead of `end`, for all queries."""
    shape, at_once = visit.shape, visit.shape.queries_at_once
    num_rows, num_keys = at_once * shape.num_heads, shape.score_keys

    def score(i: jax.Array, carry: None) -> None:
        part, group = jax.lax.div(i, shape.num_queries // at_once), jax.lax.rem(i, shape.num_queries // at_once)
        keys_Sd = visit.stream.blocks[half, pl.ds(pl.multiple_of(part * num_keys, num_keys), num_keys)]
        rows = pl.ds(pl.multiple_of(group * num_rows, num_rows), num_rows)
        queries_Md = visit.queries[0, rows]
        precision = jax.lax.Precision.HIGHEST if keys_Sd.dtype == jnp.float32 else None
        products_MS = jax.lax.dot_general(
            queries_Md, keys_Sd, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        weighted_MS = jnp.maximum(products_MS, 0.0) * jnp.tile(visit.factors[rows], (1, num_keys // LANES))
        position_S = first_key + part * num_keys + jax.lax.broadcasted_iota(jnp.int32, (1, num_keys), 1)
        first_row = jax.lax.div(first_key, LANES) + part * (num_keys // LANES)
        for query in range(at_once):
            of_query = slice(query * shape.num_heads, (query + 1) * shape.num_heads)
            sums_S = jnp.sum(weighted_MS[of_query], axis=0, keepdims=True)
            own = visit.position_of(group * at_once + query)
            ordered_S = jnp.where(position_S <= own, ordered(sums_S), UNSEEN)
            for row in range(num_keys // LANES):
                into = visit.scores.at[group * at_once + query]
                into[pl.ds(first_row + row, 1)] = ordered_S[:, row * LANES : (row + 1) * LANES]

    num_parts = pl.cdiv(jnp.minimum(end - first_key, shape.block_keys), num_keys)
    jax.lax.fori_loop(0, num_parts * (shape.num_queries // at_once), score, None)
