"""Groups of single tokens: tokens of a sequence in a step, which are adjacent and attend its pages at once.

The tokens of a group, the last one of a sequence and its drafts, have consecutive positions. So positions and the
sequence of each token determine the groups. A call of the paged attention kernel has a visit
for each group of the step.
"""

# U single tokens   G groups, and as many more as there are cores   C sets of heads   R query heads of a set, padded
# K lanes of keys   V lanes of values   X lanes of a row, or groups and one more   P page-table width

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.attention import BlockPlaces, NewRows, ScoreConfig
from rayserve_moe.kernels.tpu.byte_pairs import product_dtype, rows_to_write
from rayserve_moe.kernels.tpu.packed_rows import gather_heads, spread_queries
from rayserve_moe.kernels.tpu.paged_sizes import (
    CLEARED_ROWS,
    GROUP_ALIGNED_ROWS,
    VMEM_BYTES,
    Knobs,
    TileShape,
    layout_for,
    parts_of,
    shape_for,
)
from rayserve_moe.kernels.tpu.paged_stream import Scalars
from rayserve_moe.kernels.tpu.paged_tiles import attend_tile, first_given, sink_rows, tile_scratch
from rayserve_moe.kernels.tpu.paged_writes import max_pieces, spaced_rows

NEVER = np.iinfo(np.int32).max


def attend_groups(  # noqa: PLR0913 (arrays, by keyword)
    queries_UHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    new: NewRows,
    *,
    knobs: Knobs,
    num_cores: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `paged_attention.attend_new`, single tokens in the groups that are described for each call.

    The result of padding is undefined: a select would read and write all results once more.
    """
    assert places.together is not None and places.described is not None, "groups are described ahead of all layers"
    layout = layout_for(kv_pages, queries_UHh.shape[2], knobs)
    queries_UCRK = spread_queries(queries_UHh[:, None], layout)[:, :, 0].astype(product_dtype(kv_pages, queries_UHh))
    query_rows, most = queries_UCRK.shape[2], places.together.most
    queries_UCRK = jnp.pad(queries_UCRK, ((0, 0), (0, 0), (0, -query_rows % GROUP_ALIGNED_ROWS), (0, 0)))
    shape = shape_for(kv_pages, places, layout, knobs=knobs, queries=(most, most, queries_UCRK.shape[2]))
    shape = replace(shape, has_new_rows=True, is_grouped=True, num_cores=num_cores)
    rows_RX = spaced_rows(rows_to_write(new.rows_BX, kv_pages))
    call = partial(_call, sinks=sink_rows(knobs.sinks_H, shape), shape=shape, interpret=interpret)
    attended_UCRV = None
    for visits, part in zip(places.described, parts_of(len(queries_UHh), shape.table_width), strict=True):
        of_part = places._replace(page_table_BP=places.page_table_BP[part], described=visits)
        own_UCRV, kv_pages = call(queries_UCRK, kv_pages, of_part, NewRows(rows_RX, new.first_page))
        is_own_U111 = visits.is_own_U[:, None, None, None]
        attended_UCRV = own_UCRV if attended_UCRV is None else jnp.where(is_own_U111, own_UCRV, attended_UCRV)
    assert attended_UCRV is not None, "a step has single tokens"
    attended_UCQRV = attended_UCRV[:, :, None, :query_rows]
    attended_UQHv = gather_heads(attended_UCQRV, layout, width=layout.value_dim)
    return attended_UQHv[:, 0].astype(queries_UHh.dtype), kv_pages


def _call(  # noqa: PLR0913 (arrays, by keyword)
    queries_UCRK: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    new: NewRows,
    *,
    sinks: list[jax.Array],
    shape: TileShape,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attend the groups of `places.described` and write their rows; rows are `spaced_rows`.

    The page table has a row for each token at which a group may begin.

    Returns: [U, C, R, V], undefined for other tokens, and the pool.
    """
    visits: GroupVisits = places.described
    num_tokens, num_sets, num_rows, _ = queries_UCRK.shape
    num_visits = jnp.maximum(pl.cdiv(visits.num_groups, shape.num_cores), 1)
    begin = places.page_table_BP, visits.first_G, visits.end_G, visits.filled_X
    flat = (*begin, places.positions_BQ, visits.tables_G, visits.starts_G, visits.counts_G)
    scalars = [jnp.asarray(new.first_page, jnp.int32), *(of.reshape(-1) for of in flat)]
    given, (core, hbm) = (
        [queries_UCRK, *sinks, new.rows_BX],
        (pl.BlockSpec(memory_space=at) for at in (pltpu.VMEM, pltpu.HBM)),
    )
    out = jax.ShapeDtypeStruct((num_tokens, num_sets, num_rows, shape.layout.value_lanes), queries_UCRK.dtype)
    if not interpret:
        # XLA may otherwise bring a pool that fits into the core's memory there, and back.
        kv_pages = pltpu.with_memory_space_constraint(kv_pages, pltpu.HBM)
    attended_UCRV, kv_pages = pl.pallas_call(
        partial(attend_tile, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.num_cores, num_visits),
            in_specs=[_tokens(queries_UCRK, shape), *(core for _ in sinks), core, hbm],
            out_specs=[hbm, hbm],
            scratch_shapes=[*tile_scratch(kv_pages, shape), *_scratch(queries_UCRK, kv_pages, shape)],
        ),
        out_shape=[out, jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)],
        input_output_aliases={len(scalars) + len(given): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="paged_attention_of_groups",
        interpret=interpret,
    )(*scalars, *given, kv_pages)
    return attended_UCRV, kv_pages


def _tokens(queries_UCRK: jax.Array, shape: TileShape) -> pl.BlockSpec:
    """Return the block spec of a group's queries; a group near the end gets queries ahead of its first."""
    num_tokens, *sizes = queries_UCRK.shape
    num_given = min(shape.num_queries, num_tokens)

    def of_visit(core: jax.Array, step: jax.Array, *scalars: Any) -> tuple[jax.Array | int, ...]:
        start = Scalars(*scalars).starts[core * pl.num_programs(1) + step]
        return first_given(start, num_tokens, num_given), 0, 0, 0

    return pl.BlockSpec(tuple(pl.Element(size) for size in (num_given, *sizes)), of_visit)


def _scratch(queries_UCRK: jax.Array, kv_pages: jax.Array, shape: TileShape) -> list[Any]:
    """Return the scratch of `GroupWrites` and `GroupTokens`."""
    (_, num_sets, num_rows, lanes), dtype = queries_UCRK.shape, queries_UCRK.dtype
    used, done = pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA
    return [
        pltpu.VMEM((max_pieces(shape.num_queries), CLEARED_ROWS, kv_pages.shape[2]), kv_pages.dtype),
        used,
        done,
        pltpu.VMEM((1, num_sets, shape.num_rows, lanes), dtype),
        pltpu.VMEM((shape.num_queries, num_sets, num_rows, shape.layout.value_lanes), dtype),
        used,
        done,
    ]


class GroupVisits(NamedTuple):
    """Groups that begin in a part of the single tokens, int32, real groups first.

    A group sees keys from `first_G` to ahead of `end_G`, and has `counts_G` tokens from `starts_G` on, with page ids in
    row `tables_G` of the part. `is_own_U` is True for tokens of groups; `filled_X` are the numbers of groups in order,
    followed by a number of no group.
    """

    first_G: jax.Array
    end_G: jax.Array
    filled_X: jax.Array
    tables_G: jax.Array
    starts_G: jax.Array
    counts_G: jax.Array
    is_own_U: jax.Array

    @property
    def num_groups(self) -> jax.Array:
        """Return the number of groups."""
        return jnp.sum(self.counts_G > 0, dtype=jnp.int32)


def groups_of(
    positions_U: jax.Array,
    sequences_U: jax.Array,
    config: ScoreConfig,
    *,
    part: slice,
    num_cores: int,
) -> GroupVisits:
    """Return the groups that begin in a `part` of the single tokens; tokens of a sequence are adjacent."""
    num_tokens, num_groups = len(positions_U), part.stop - part.start + num_cores
    first_U = config.first_key(positions_U)
    first_U = jnp.zeros_like(positions_U) if first_U is None else first_U
    numbers_U, is_real_U = np.arange(num_tokens, dtype=np.int32), positions_U >= 0
    goes_on_U = is_real_U & jnp.roll(is_real_U, 1) & (sequences_U == jnp.roll(sequences_U, 1)) & (numbers_U > 0)
    begins_U = is_real_U & ~goes_on_U
    in_part_U = begins_U & (numbers_U >= part.start) & (numbers_U < part.stop)
    group_U = jnp.cumsum(begins_U) - 1 - jnp.sum(begins_U & (numbers_U < part.start))
    own_GU = (group_U == np.arange(num_groups)[:, None]) & (group_U < jnp.sum(in_part_U)) & is_real_U

    def least(of_U: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(own_GU, of_U, NEVER), axis=1)

    counts_G = jnp.sum(own_GU, axis=1, dtype=jnp.int32)
    first_G, starts_G = (jnp.where(counts_G > 0, least(of_U), 0) for of_U in (first_U, jnp.asarray(numbers_U)))
    end_G = jnp.max(jnp.where(own_GU, positions_U + 1, 0), axis=1)
    order_X = np.arange(num_groups + 1, dtype=np.int32)
    filled_X = jnp.where(order_X < jnp.sum(counts_G > 0), order_X, NEVER)
    tables_G = jnp.maximum(starts_G - part.start, 0)
    return GroupVisits(first_G, end_G, filled_X, tables_G, starts_G, counts_G, own_GU.any(axis=0))
