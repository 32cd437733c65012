"""Paged attention in one TPU kernel of our own: sinks, latents, narrow heads, windows, and drafts.

The pool has the rows of `packed_rows`. Pages are copied into the core's memory a block at a time while the previous
block is multiplied, across the sequences of a step. Only pages within reach of a block of queries are copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, NewRows, ScoreConfig, Together
from rayserve_moe.kernels.tpu.byte_pairs import product_dtype, rows_to_write
from rayserve_moe.kernels.tpu.packed_rows import LANES, gather_heads, set_lanes, spread_queries
from rayserve_moe.kernels.tpu.paged_choice import ALIGNED_HEADS, sees_all
from rayserve_moe.kernels.tpu.paged_groups import GroupVisits, attend_groups, groups_of
from rayserve_moe.kernels.tpu.paged_sizes import (
    CLEARED_ROWS,
    VMEM_BYTES,
    Knobs,
    TileShape,
    layout_for,
    parts_of,
    shape_for,
    tile_queries_for,
)
from rayserve_moe.kernels.tpu.paged_tiles import attend_tile, sink_rows, tile_scratch
from rayserve_moe.kernels.tpu.paged_writes import NEW_ROWS


def unsupported_reason(pool: PoolFormat, *, head_dim: int, value_dim: int) -> str:
    """Return why the kernel does not take a pool of keys and values of these sizes; empty if it does."""
    num_registers = set_lanes(head_dim, value_dim) // LANES
    if pool.is_8_bit and num_registers % 2:
        return (
            f"kv_cache_dtype fp8 stores pairs of registers, and keys of {head_dim} with values of {value_dim} take "
            f"{num_registers}"
        )
    return unsupported_pages(pool)


def unsupported_latents(pool: PoolFormat, **_: int) -> str:
    """Return why the kernel does not take a pool of latents; empty if it does."""
    return "kv_cache_dtype fp8 does not store latents" if pool.is_8_bit else unsupported_pages(pool)


def unsupported_pages(pool: PoolFormat) -> str:
    """Return why the kernel does not take the pages of a pool; empty if it does."""
    if pool.page_size % CLEARED_ROWS:
        return f"page_size {pool.page_size} is no multiple of {CLEARED_ROWS}"
    return ""


def attend(  # noqa: PLR0913 (the reference's signature)
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    config: ScoreConfig = FULL_CAUSAL,
    sinks_H: jax.Array | None = None,
    latent_width: int = 0,
    value_width: int = 0,
    block_size: int = 0,
    interpret: Any = False,
) -> jax.Array:
    """Attend as `reference.attention.attend` does, over a pool [N, page, X] of rows as `packed_rows` has them.

    Without a window, queries may see chosen positions only, or chosen blocks of 128 if a head fills a register
    (`paged_choice`): pages are read nevertheless. Products have the pool's dtype, or the dtype of queries if the pool
    has pairs of 8 bits (`byte_pairs`). The real rows of a block come first. `interpret` (see `pallas_call`) runs it
    without a TPU.

    Returns: [B, Q, H, v].
    Raises: ValueError for a pool of other rows, of 8 bits that are not paired, or of pages of no multiple of 16 keys.
    """
    knobs = Knobs(config, sinks_H, latent_width, value_width, block_size)
    return _attend(queries_BQHh, kv_pages, places, None, knobs=knobs, interpret=interpret)[0]


def attend_new(  # noqa: PLR0913 (as `attend`)
    queries_BHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    new: NewRows,
    *,
    config: ScoreConfig = FULL_CAUSAL,
    sinks_H: jax.Array | None = None,
    latent_width: int = 0,
    value_width: int = 0,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `reference.attention.attend_new` does, over a pool as `attend` takes it.

    `places.together` declares the tokens of a sequence, which are adjacent; without it every token has its own
    sequence. Nothing is written for padding.
    """
    knobs = Knobs(config, sinks_H, latent_width, value_width)
    if places.together is not None:
        num_cores = cores_for(len(queries_BHh), interpret)
        return attend_groups(queries_BHh, kv_pages, places, new, knobs=knobs, num_cores=num_cores, interpret=interpret)
    attended_B1Hv, kv_pages = _attend(queries_BHh[:, None], kv_pages, places, new, knobs=knobs, interpret=interpret)
    return attended_B1Hv[:, 0], kv_pages


def _attend(
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    new: NewRows | None,
    *,
    knobs: Knobs,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return the result of `attend`, and the pool with the new rows."""
    layout, num_heads = layout_for(kv_pages, queries_BQHh.shape[3], knobs), queries_BQHh.shape[2]
    if places.chosen_BQK is not None:
        assert layout.set_heads == 1 and not knobs.config.window, "sets of a head each choose, without windows"
        assert knobs.block_size in (0, LANES) and (knobs.block_size or layout.num_sets == 1), "a choice serves a set"
        queries_BQHh = _padded_sets(queries_BQHh, layout.num_sets)
    queries_BCQRK = spread_queries(queries_BQHh, layout).astype(product_dtype(kv_pages, queries_BQHh))
    tile_queries = tile_queries_for(queries_BQHh.shape[1], queries_BCQRK.shape[3])
    queries = queries_BQHh.shape[1], tile_queries, queries_BCQRK.shape[3]
    shape = shape_for(kv_pages, places, layout, knobs=knobs, queries=queries)
    shape = replace(shape, has_new_rows=new is not None)
    sinks = sink_rows(knobs.sinks_H, shape)
    call = partial(_call, sinks=sinks, interpret=interpret)
    parts: list[jax.Array] = []
    for part in parts_of(len(queries_BQHh), shape.table_width):
        visits = places.described and places.described[len(parts)]
        chosen = None if places.chosen_BQK is None else places.chosen_BQK[part]
        of_call = BlockPlaces(places.page_table_BP[part], places.positions_BQ[part], visits, chosen_BQK=chosen)
        num_blocks = part.stop - part.start
        of_part = replace(shape, num_blocks=num_blocks, num_cores=cores_for(num_blocks, interpret))
        news = None if new is None else NewRows(rows_to_write(new.rows_BX[part], kv_pages), new.first_page)
        attended, kv_pages = call(queries_BCQRK[part], kv_pages, of_call, news, shape=of_part)
        parts.append(attended)
    attended_BCQRV = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    attended_BCQRV = attended_BCQRV[:, :, :, : num_heads // layout.num_sets]
    attended_BQHv = gather_heads(attended_BCQRV, layout, width=layout.value_dim)
    return attended_BQHv.astype(queries_BQHh.dtype), kv_pages


def _padded_sets(queries_BQHh: jax.Array, num_sets: int) -> jax.Array:
    """Pad queries so that their sets have whole registers of rows."""
    num_blocks, num_queries, _, width = queries_BQHh.shape
    queries_BQCRh = queries_BQHh.reshape(num_blocks, num_queries, num_sets, -1, width)
    more = -queries_BQCRh.shape[3] % ALIGNED_HEADS
    padded = jnp.pad(queries_BQCRh, ((0, 0), (0, 0), (0, 0), (0, more), (0, 0)))
    return padded.reshape(num_blocks, num_queries, -1, width)


def describe_singles(
    positions_U: jax.Array,
    *,
    page_size: int,
    table_width: int,
    windows: Iterable[int],
    together: Together | None = None,
) -> dict[int, tuple[Visits, ...] | tuple[GroupVisits, ...]]:
    """Return the visits of single tokens for each call of the kernel, by window (0: none); all layers share them."""
    del page_size
    parts = parts_of(len(positions_U), table_width)
    if together is not None:
        known = positions_U, together.sequences_B
        num_cores = cores_for(len(positions_U))
        return {
            window: tuple(groups_of(*known, ScoreConfig(window), part=part, num_cores=num_cores) for part in parts)
            for window in set(windows)
        }

    calls = [for_cores(positions_U[part, None], cores_for(part.stop - part.start), fill=-1) for part in parts]
    return {
        window: tuple(visits_of(call_U1, ScoreConfig(window), tile_queries=1) for call_U1 in calls)
        for window in set(windows)
    }


def cores_for(num_blocks: int, interpret: Any = False) -> int:
    """Return the number of cores that share blocks: at most a core per block, so that none has padding alone."""
    return min(num_blocks, cores_of_device(interpret))


def cores_of_device(interpret: Any = False) -> int:
    """Return the number of cores that share a device; 1 without a TPU."""
    return 1 if interpret else pltpu.get_tpu_info().num_cores


def _call(  # noqa: PLR0913 (arrays, by keyword)
    queries_BCQRK: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    new: NewRows | None,
    *,
    sinks: list[jax.Array],
    shape: TileShape,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attend blocks with a page table that fits into scalar memory: [B, C, Q, R, V], and the pool."""
    num_blocks, num_sets, num_queries, query_rows, lanes = queries_BCQRK.shape
    num_rows, num_lanes = num_queries * query_rows, shape.layout.value_lanes
    (table_BP, positions_BQ, visits, *_), core = places, pl.BlockSpec(memory_space=pltpu.VMEM)
    table_BP, positions_BQ = for_cores(table_BP, shape.num_cores), for_cores(positions_BQ, shape.num_cores, fill=-1)
    if visits is None:
        visits = visits_of(positions_BQ, shape.config, tile_queries=shape.tile_queries)
    queries_BCMK = for_cores(queries_BCQRK.reshape(num_blocks, num_sets, num_rows, lanes), shape.num_cores)
    queries_BCMK = jnp.pad(queries_BCMK, ((0, 0), (0, 0), (0, shape.num_tiles * shape.num_rows - num_rows), (0, 0)))
    pool = jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)
    hbm, first_page = pl.BlockSpec(memory_space=pltpu.HBM), jnp.asarray(0 if new is None else new.first_page, jnp.int32)
    rows = [] if new is None else [for_cores(new.rows_BX, shape.num_cores)]
    scalars = [first_page, *(a.reshape(-1) for a in (table_BP, *visits, positions_BQ))]
    see_all, chosen = _choice_of_visits(places, shape)
    scalars, given = [*scalars, *see_all], [queries_BCMK, *sinks, *rows, *chosen]
    if not interpret:
        # XLA may otherwise bring a pool that fits into the core's memory there, and back.
        kv_pages = pltpu.with_memory_space_constraint(kv_pages, pltpu.HBM)
    attended_BCMV, *written = pl.pallas_call(
        partial(attend_tile, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.num_cores, shape.visits_per_core),
            in_specs=[
                _block(lanes, shape),
                *(core for _ in sinks),
                *(_rows(a, shape) for a in rows),
                *(_choice(a, shape) for a in chosen),
                hbm,
            ],
            out_specs=[_block(num_lanes, shape), *(hbm for _ in rows)],
            scratch_shapes=_scratch(kv_pages, shape),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*queries_BCMK.shape[:3], num_lanes), queries_BCMK.dtype),
            *(pool for _ in rows),
        ],
        input_output_aliases={len(scalars) + len(given): 1} if rows else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="paged_attention",
        interpret=interpret,
    )(*scalars, *given, kv_pages)
    attended_BCMV = attended_BCMV[:num_blocks, :, :num_rows]
    return attended_BCMV.reshape(*queries_BCQRK.shape[:4], num_lanes), written[0] if written else kv_pages


def _choice_of_visits(places: BlockPlaces, shape: TileShape) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return `see_all` and `chosen` of `TileChoice` for all visits, if tokens are chosen."""
    if places.chosen_BQK is None:
        return [], []
    sees_all_BQ = sees_all(places, shape.block_size) | (places.positions_BQ < 0)
    sees_all_BQ = for_cores(sees_all_BQ.astype(jnp.int32), shape.num_cores, fill=1)
    see_all_W = jnp.min(sees_all_BQ.reshape(-1, shape.tile_queries), axis=1)
    chosen = for_cores(places.chosen_BQK, shape.num_cores, fill=-1)
    chosen_WqCK = chosen.reshape(-1, shape.tile_queries, shape.choice_sets, chosen.shape[-1])
    chosen_WCqK = jnp.swapaxes(chosen_WqCK, 1, 2)
    chosen_WCqK = jnp.pad(chosen_WCqK, ((0, 0),) * 3 + ((0, -chosen.shape[-1] % LANES),), constant_values=-1)
    return [see_all_W], [chosen_WCqK.reshape(len(see_all_W), -1, chosen_WCqK.shape[3])]


def _choice(chosen_WDK: jax.Array, shape: TileShape) -> pl.BlockSpec:
    """Return the block spec of the chosen tokens of a visit."""
    return pl.BlockSpec((1, *chosen_WDK.shape[1:]), lambda core, step, *_: (core * shape.visits_per_core + step, 0, 0))


def _scratch(kv_pages: jax.Array, shape: TileShape) -> list[Any]:
    """Return `tile_scratch`, and the fields of `RowWrites` after its rows if there are new rows."""
    writes = [
        pltpu.VMEM((CLEARED_ROWS, kv_pages.shape[2]), kv_pages.dtype),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA,
    ]
    return [*tile_scratch(kv_pages, shape), *(writes if shape.has_new_rows else [])]


def _rows(rows_BX: jax.Array, shape: TileShape) -> pl.BlockSpec:
    """Return the block spec of the new rows that include the row of a visit."""
    num_rows = min(NEW_ROWS, len(rows_BX))

    def of_visit(core: jax.Array, step: jax.Array, *_: Any) -> tuple[jax.Array, int]:
        return jax.lax.div(core * shape.visits_per_core + step, num_rows), 0

    return pl.BlockSpec((num_rows, rows_BX.shape[1]), of_visit)


def _block(width: int, shape: TileShape) -> pl.BlockSpec:
    """Return the block spec of a visit's rows with `width` lanes."""

    def of_visit(core: jax.Array, step: jax.Array, *_: Any) -> tuple[jax.Array | int, ...]:
        visit = core * shape.visits_per_core + step
        return jax.lax.div(visit, shape.num_tiles), 0, jax.lax.rem(visit, shape.num_tiles), 0

    return pl.BlockSpec((1, shape.layout.num_sets, shape.num_rows, width), of_visit)


def for_cores(array: jax.Array, num_cores: int, fill: int = 0) -> jax.Array:
    """Return an array of blocks padded with `fill` to a multiple of `num_cores`."""
    more = -len(array) % num_cores
    return jnp.pad(array, ((0, more), *((0, 0),) * (array.ndim - 1)), constant_values=fill) if more else array


class Visits(NamedTuple):
    """Keys that each visit sees, by the positions of its queries, int32."""

    first_W: jax.Array
    """First key, 0 for a visit of padding alone."""
    end_W: jax.Array
    """End of the keys, at most 0 for a visit of padding alone."""
    filled_X: jax.Array
    """First visit from each on that sees keys [W + 1]; W if there are no more."""


def visits_of(positions_BQ: jax.Array, config: ScoreConfig, *, tile_queries: int) -> Visits:
    """Return the visits of `tile_queries` queries each."""
    positions_Wq = positions_BQ.reshape(-1, tile_queries)
    is_real_Wq = positions_Wq >= 0
    first_Wq = config.first_key(positions_Wq)
    first_W = jnp.min(jnp.where(is_real_Wq, 0 if first_Wq is None else first_Wq, np.iinfo(np.int32).max), axis=1)
    end_W = jnp.max(positions_Wq, axis=1) + 1
    first_W = jnp.where(end_W > 0, first_W, 0)
    visits_W = jnp.where(end_W > 0, np.arange(len(positions_Wq), dtype=np.int32), len(positions_Wq))
    filled_X = jax.lax.cummin(jnp.append(visits_W, len(positions_Wq)), reverse=True)
    return Visits(first_W, end_W, filled_X)
