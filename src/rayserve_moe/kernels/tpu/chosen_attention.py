"""Latent attention to chosen tokens in one TPU kernel, which copies no other pages: single tokens, and long prompts.

A row of 16 bits shares registers with its neighbours, so each chosen row is copied with the `GROUP_ROWS` rows around
it. A block of chosen tokens is copied while the previous block is multiplied, across the tokens of a step.
"""

# B single tokens   H heads   h width of a query   v latent   P page-table width   K chosen tokens, padded
# M rows of a token's heads   S rows of a block   X lanes of a row   G rows of a group

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.attention import BlockPlaces, ScoreConfig
from rayserve_moe.kernels.tpu import paged_attention
from rayserve_moe.kernels.tpu.packed_rows import LANES, gather_heads, spread_queries
from rayserve_moe.kernels.tpu.paged_attention import cores_for, for_cores
from rayserve_moe.kernels.tpu.paged_choice import sees_all
from rayserve_moe.kernels.tpu.paged_sizes import ALIGNED_ROWS, VMEM_BYTES, Knobs, TileShape, layout_for, parts_of
from rayserve_moe.kernels.tpu.paged_tiles import Sums, Tile, accumulate, begin_sums

GROUP_ROWS, BLOCK_ROWS = 8, 512
"""Rows that are copied for a chosen token; rows of a block."""
BLOCK_TOKENS = BLOCK_ROWS // GROUP_ROWS
REQUEST_S, COPY_SHARE, MATRIX_SHARE = 7.5e-9, 0.6, 0.75
"""Seconds of a core to request a copy, 13 bundles. Shares that calibrated estimates reach: of the rate of such copies,
and of the matrix peak by attention under a mask."""


def attend_all_or_chosen(
    queries_B1Hh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    config: ScoreConfig,
    latent_width: int,
    interpret: Any = False,
) -> jax.Array:
    """Attend single tokens as `reference.attention.attend` over latents in rows of `packed_latents`, [N, page, X].

    Queries that see all tokens before them are attended by the kernel of dense attention, with its bits; others by
    `attend_chosen`.
    """
    positions_B1, is_dense_B1 = places.positions_BQ, sees_all(places)
    every = BlockPlaces(places.page_table_BP, jnp.where(is_dense_B1, positions_B1, -1))
    some = places._replace(positions_BQ=jnp.where(is_dense_B1, -1, positions_B1), described=None)
    dense_B1Hv, sparse_B1Hv = (
        attend(queries_B1Hh, kv_pages, of, config=config, latent_width=latent_width, interpret=interpret)
        for attend, of in ((paged_attention.attend, every), (attend_chosen, some))
    )
    return jnp.where(is_dense_B1[..., None, None], dense_B1Hv, sparse_B1Hv)


def attend_prompts(  # noqa: PLR0913 (as `reference.attention.attend`)
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    config: ScoreConfig,
    latent_width: int,
    masked_until: int = 0,
    interpret: Any = False,
) -> jax.Array:
    """Attend blocks of prompts to `places.chosen_BQK`, over a pool as `attend_all_or_chosen` takes it.

    Tokens at positions below `masked_until` (0: from the figures of the chip) share the pages of their block under a
    mask. Others are attended as single tokens. A token's position alone decides, so its result does not depend on how a
    prompt is cut.
    """
    (num_blocks, num_queries, num_heads, _), positions_BQ = queries_BQHh.shape, places.positions_BQ
    masked, copied = (
        partial(attend, config=config, latent_width=latent_width, interpret=interpret)
        for attend in (paged_attention.attend, attend_chosen)
    )
    assert places.chosen_BQK is not None, "tokens are chosen"
    if not masked_until:
        row_lanes, top_k = kv_pages.shape[2], places.chosen_BQK.shape[2]
        masked_until = masked_tokens(num_heads, row_lanes, latent_width, top_k=top_k, interpret=interpret)
    if places.page_table_BP.shape[1] * kv_pages.shape[1] <= masked_until:
        return masked(queries_BQHh, kv_pages, places)
    is_far_BQ = positions_BQ >= masked_until

    def attend_block(block: tuple[jax.Array, ...]) -> jax.Array:
        queries_QHh, table_P, positions_Q, chosen_QK = block
        tables_QP = jnp.broadcast_to(table_P, (num_queries, len(table_P)))
        tokens = BlockPlaces(tables_QP, positions_Q[:, None], chosen_BQK=chosen_QK[:, None])
        return copied(queries_QHh[:, None], kv_pages, tokens)[:, 0]

    def attend_far() -> jax.Array:
        far_BQ = jnp.where(is_far_BQ, positions_BQ, -1)
        return jax.lax.map(attend_block, (queries_BQHh, places.page_table_BP, far_BQ, places.chosen_BQK))

    def nothing() -> jax.Array:
        return jnp.zeros((num_blocks, num_queries, num_heads, latent_width), queries_BQHh.dtype)

    near = places._replace(positions_BQ=jnp.where(is_far_BQ, -1, positions_BQ))
    near_BQHv = masked(queries_BQHh, kv_pages, near)
    far_BQHv = jax.lax.cond(jnp.any(is_far_BQ), attend_far, nothing)
    return jnp.where(is_far_BQ[..., None, None], far_BQHv, near_BQHv)


def masked_tokens(num_heads: int, row_lanes: int, value_lanes: int, *, top_k: int, interpret: Any = False) -> int:
    """Return the context up to which products under a mask take no longer than copies of `top_k` chosen rows.

    Without a TPU it is unbounded.
    """
    if interpret:
        return np.iinfo(np.int32).max
    chip = pltpu.get_tpu_info()
    copies_s = top_k * max(GROUP_ROWS * 2 * row_lanes / chip.mem_bw_bytes_per_second, REQUEST_S) / COPY_SHARE
    return int(copies_s * MATRIX_SHARE * chip.bf16_ops_per_second / (2 * num_heads * (row_lanes + value_lanes)))


def attend_chosen(
    queries_B1Hh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    config: ScoreConfig,
    latent_width: int,
    interpret: Any = False,
) -> jax.Array:
    """Attend single tokens to `places.chosen_BQK` as `reference.attention.attend`, over a pool [N, page, X].

    Rows up to a token's position that it did not choose must be finite; all others have no effect, even NaN.
    """
    assert places.chosen_BQK is not None, "tokens are chosen"
    layout = layout_for(kv_pages, queries_B1Hh.shape[3], Knobs(config, None, latent_width))
    queries_BMX = spread_queries(queries_B1Hh, layout)[:, 0, 0].astype(kv_pages.dtype)
    num_heads, table_width = queries_BMX.shape[1], places.page_table_BP.shape[1]
    queries_BMX = jnp.pad(queries_BMX, ((0, 0), (0, -num_heads % ALIGNED_ROWS), (0, 0)))
    chosen_BK, positions_B = places.chosen_BQK[:, 0], places.positions_BQ[:, 0]
    chosen_BK = jnp.pad(chosen_BK, ((0, 0), (0, -chosen_BK.shape[1] % BLOCK_TOKENS)), constant_values=-1)
    shape = TileShape(
        layout,
        num_cores=1,
        num_blocks=0,
        num_queries=1,
        tile_queries=1,
        query_rows=queries_BMX.shape[1],
        table_width=table_width,
        page_size=kv_pages.shape[1],
        num_pages=1,
        config=config,
        has_sinks=False,
    )
    parts = []
    for part in parts_of(len(positions_B), table_width + chosen_BK.shape[1]):
        num_blocks = part.stop - part.start
        of_part = replace(shape, num_blocks=num_blocks, num_cores=cores_for(num_blocks, interpret))
        tokens = queries_BMX[part], places.page_table_BP[part], positions_B[part], chosen_BK[part]
        parts.append(_call(*tokens, kv_pages=kv_pages, shape=of_part, interpret=interpret))
    attended_BMv = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    attended_B11Mv = attended_BMv[:, None, None, :num_heads]
    return gather_heads(attended_B11Mv, layout, width=layout.value_dim).astype(queries_B1Hh.dtype)


def _call(  # noqa: PLR0913 (arrays of tokens)
    queries_BMX: jax.Array,
    table_BP: jax.Array,
    positions_B: jax.Array,
    chosen_BK: jax.Array,
    *,
    kv_pages: jax.Array,
    shape: TileShape,
    interpret: Any,
) -> jax.Array:
    """Attend tokens with page ids and chosen positions that fit into scalar memory: [B, M, v]."""
    num_tokens, num_rows, lanes = queries_BMX.shape
    cores = shape.num_cores
    queries_BMX, table_BP, positions_B, chosen_BK = (
        for_cores(array, cores, fill=fill)
        for array, fill in ((queries_BMX, 0), (table_BP, 0), (positions_B, -1), (chosen_BK, -1))
    )
    counts_B = jnp.where(positions_B >= 0, jnp.sum(chosen_BK >= 0, axis=1, dtype=jnp.int32), 0)
    numbers_B = jnp.where(counts_B > 0, np.arange(len(counts_B), dtype=np.int32), len(counts_B))
    filled_X = jax.lax.cummin(jnp.append(numbers_B, len(counts_B)), reverse=True)
    # Empty slots copy the last token's group, which is masked.
    tokens_BK = jnp.where(chosen_BK >= 0, chosen_BK, jnp.max(chosen_BK, axis=1, keepdims=True, initial=0))
    is_seen_BKG = (tokens_BK[..., None] % GROUP_ROWS == np.arange(GROUP_ROWS)) & (chosen_BK[..., None] >= 0)
    is_seen_B1S = is_seen_BKG.astype(jnp.int32).reshape(len(counts_B), 1, -1)
    places_BK, own_B = (_place_of(each, shape.page_size) for each in (tokens_BK, jnp.maximum(positions_B, 0)))
    pages_BP = table_BP * (shape.page_size // GROUP_ROWS)
    scalars = [each.reshape(-1) for each in (pages_BP, counts_B, filled_X, own_B, positions_B % GROUP_ROWS, places_BK)]
    pool = kv_pages.reshape(-1, GROUP_ROWS, kv_pages.shape[2])
    if not interpret:
        # XLA may otherwise bring a pool that fits into the core's memory there.
        pool = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    width, sums = shape.layout.value_lanes, [(1, num_rows, LANES), (1, num_rows, LANES)]
    attended_BMv = pl.pallas_call(
        partial(_attend, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores, shape.visits_per_core),
            in_specs=[
                _visit((1, num_rows, lanes), shape),
                _visit(is_seen_B1S.shape[1:], shape),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=_visit((num_rows, width), shape),
            scratch_shapes=[
                pltpu.VMEM((2, BLOCK_ROWS, kv_pages.shape[2]), kv_pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                *(pltpu.VMEM(of, jnp.float32) for of in (*sums, (1, num_rows, width))),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((len(counts_B), num_rows, width), queries_BMX.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name="chosen_attention",
        interpret=interpret,
    )(*scalars, queries_BMX[:, None], is_seen_B1S, pool)
    return attended_BMv[:num_tokens]


def _visit(sizes: tuple[int, ...], shape: TileShape) -> pl.BlockSpec:
    """Return the block spec of a token's part of an array."""
    nothing = (0,) * len(sizes)
    return pl.BlockSpec((1, *sizes), lambda core, step, *_: (core * shape.visits_per_core + step, *nothing))


PAGE_SHIFT = 16
"""Bits of a group's number within its page."""


def _place_of(positions: jax.Array, page_size: int) -> jax.Array:
    """Return the place of a position's group: the number of its page in a page table, and its number in the page."""
    page, row = positions // page_size, positions % page_size
    return page << PAGE_SHIFT | row // GROUP_ROWS


@dataclass(frozen=True)
class RowStream:
    """Chosen rows on their way into two blocks [2, S, X] of the core's memory, with a semaphore each.

    Scalar memory holds the first group of each page [B * P], the number of chosen tokens [B], the next token with any
    [B + 1], the place of a token's own group and its row there [B], and places of the chosen tokens' groups [B * K].
    """

    pages: Any
    counts: Any
    filled: Any
    own_places: Any
    own_rows: Any
    places: Any
    pool: Any
    """Groups of rows [N * page / G, G, X]."""
    blocks: Any
    arrivals: Any
    table_width: int

    def _first_slot(self, token: jax.Array, block: jax.Array) -> jax.Array:
        num_slots = self.places.shape[0] // self.counts.shape[0]
        return token * num_slots + block * BLOCK_TOKENS

    def num_blocks(self, token: jax.Array) -> jax.Array:
        """Return the number of blocks of a token; 0 for padding."""
        return pl.cdiv(self.counts[token], BLOCK_TOKENS)

    def start(self, token: jax.Array, block: jax.Array, half: jax.Array) -> None:
        """Request the groups of a block."""
        first, table = self._first_slot(token, block), token * self.table_width
        # With constant slots a copy takes half as many scalar instructions as in a loop.
        for slot in range(BLOCK_TOKENS):
            place = self.places[first + slot]
            page = self.pages[table + jax.lax.shift_right_logical(place, PAGE_SHIFT)]
            group = page + (place & ((1 << PAGE_SHIFT) - 1))
            target = self.blocks.at[half, pl.ds(slot * GROUP_ROWS, GROUP_ROWS)]
            pltpu.make_async_copy(self.pool.at[group], target, self.arrivals.at[half]).start()

    def start_after(self, token: jax.Array, block: jax.Array, *, end: jax.Array, half: jax.Array) -> None:
        """Request the block after a block of a token: its next one, or the first one of a token ahead of `end`."""
        is_last = block + 1 >= self.num_blocks(token)
        following = jnp.where(is_last, self.filled[token + 1], token)
        pl.when(following < end)(lambda: self.start(following, jnp.where(is_last, 0, block + 1), half))

    def wait(self, half: jax.Array) -> None:
        """Wait for all groups of a block at once: a semaphore counts bytes."""
        pltpu.make_async_copy(self.blocks.at[half], self.blocks.at[half], self.arrivals.at[half]).wait()

    def clear(self, token: jax.Array, block: jax.Array, half: jax.Array) -> None:
        """Zero the rows after a token's own position, which lie in the group of its last chosen tokens only."""
        first, own, of_piece = self._first_slot(token, block), self.own_places[token], ALIGNED_ROWS // GROUP_ROWS
        count = jnp.minimum(self.counts[token] - block * BLOCK_TOKENS, BLOCK_TOKENS)
        row_R1 = jax.lax.broadcasted_iota(jnp.int32, (ALIGNED_ROWS, 1), 0)

        def clear_piece(piece: jax.Array, carry: None) -> None:
            # The first row of each group that the token does not see.
            end_R1 = jnp.full((ALIGNED_ROWS, 1), GROUP_ROWS)
            for i in range(of_piece):
                is_own = self.places[first + piece * of_piece + i] == own
                end = jnp.where(is_own, self.own_rows[token] + 1, GROUP_ROWS)
                end_R1 = jnp.where(row_R1 // GROUP_ROWS == i, end, end_R1)
            rows = pl.ds(pl.multiple_of(piece * ALIGNED_ROWS, ALIGNED_ROWS), ALIGNED_ROWS)
            held = self.blocks[half, rows].astype(jnp.float32)
            self.blocks[half, rows] = jnp.where(row_R1 % GROUP_ROWS < end_R1, held, 0.0).astype(self.blocks.dtype)

        @pl.when(self.places[first + BLOCK_TOKENS - 1] == own)
        def _() -> None:
            # At most `GROUP_ROWS` tokens, the last ones, and slots without a token hold the token's own group.
            begin = jax.lax.div(jnp.maximum(count - GROUP_ROWS, 0), of_piece)
            jax.lax.fori_loop(begin, BLOCK_TOKENS // of_piece, clear_piece, None)


def _attend(*refs: Any, shape: TileShape) -> None:
    """Attend the token of a step of the grid."""
    scalars, (queries, is_seen, pool, out, blocks, arrivals, num_done, *sums) = refs[:6], refs[6:]
    stream = RowStream(*scalars, pool, blocks, arrivals, shape.table_width)
    begin = pl.program_id(0) * shape.visits_per_core
    end, token = begin + shape.visits_per_core, begin + pl.program_id(1)
    tile = Tile(token, queries, Sums(*sums), None, shape)
    num_blocks = stream.num_blocks(token)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        num_done[0] = 0
        first = stream.filled[begin]
        pl.when(first < end)(lambda: stream.start(first, jnp.int32(0), jnp.int32(0)))

    def attend_block(i: jax.Array, carry: None) -> None:
        half = jax.lax.rem(num_done[0], 2)
        stream.start_after(token, i, end=end, half=1 - half)
        stream.wait(half)
        stream.clear(token, i, half)
        seen_S = is_seen[0, :, pl.ds(pl.multiple_of(i * BLOCK_ROWS, BLOCK_ROWS), BLOCK_ROWS)]
        is_seen_MS = jnp.broadcast_to(seen_S, (shape.query_rows, BLOCK_ROWS)) > 0
        accumulate(tile, range(1), slice(None), blocks.at[half], is_seen_MS)
        num_done[0] = num_done[0] + 1

    begin_sums(tile.sums)
    jax.lax.fori_loop(0, num_blocks, attend_block, None)
    weight_Mv = jnp.tile(tile.sums.weight[0], (1, out.shape[2] // LANES))
    out[0] = (tile.sums.total[0] / jnp.maximum(weight_Mv, 1.0)).astype(out.dtype)
