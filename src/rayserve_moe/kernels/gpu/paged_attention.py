"""Paged attention of GPUs: a Triton kernel that reads each page in place, with the keys of a block in several shares.

Few sequences would leave most of a GPU idle, so the keys of a block are cut into shares that are attended at the same
time. Each share returns its weighted values, its largest score and its sum of weights, and a sum over shares follows
(flash decoding). Windows skip the keys ahead of them, sinks count in the last sum.
"""

# B blocks   Q queries per block   H query heads   G KV heads   h key width   v value width   P page-table width
# M queries * query heads per KV head   I parts of M   S shares of the keys

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.gpu.blocks import MIN_SIZE, at_rows, cdiv, parts_of, power_of_two, product
from rayserve_moe.kernels.reference import attention as reference
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, MASKED, BlockPlaces, ScoreConfig

MAX_PROGRAMS = 528
"""Programs that fill a GPU: four for each of 132 multiprocessors."""
MAX_ROWS = 64
"""Maximum queries of a program."""
FAR = np.int32(2**30)
"""A position beyond all others."""


class Sizes(NamedTuple):
    """Sizes of a call."""

    width: int
    """Elements of a key."""
    values: int
    """Elements of a value."""
    values_at: int
    """Place of a value in a row of the pool."""
    rows: int
    """Queries of a program."""
    keys: int
    """Keys that a program reads at once."""
    shares: int
    page_size: int
    warps: int
    stages: int


def unsupported_latents(_: PoolFormat, *, row_width: int, latent_width: int) -> str:
    """Return why the kernel does not take latents of these sizes; empty if it does."""
    if row_width % MIN_SIZE or latent_width % MIN_SIZE:
        return f"rows of {row_width} with latents of {latent_width} elements are no multiples of {MIN_SIZE}"
    return ""


def unsupported_reason(_: PoolFormat, *, head_dim: int, value_dim: int, **__: int) -> str:
    """Return why the kernel does not take heads of these sizes; empty if it does."""
    if head_dim % MIN_SIZE or value_dim % MIN_SIZE:
        return f"keys of {head_dim} with values of {value_dim} elements are no multiples of {MIN_SIZE}"
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
    interpret: bool = False,
) -> jax.Array:
    """Attend as `reference.attention.attend` does, over a pool [N, page, G, h + v] in the dtype of keys and values.

    Products have operands in the dtype of keys and values, in bfloat16 for a pool of 8 bits, and add up in float32.
    `interpret` (see `pallas_call`) runs it without a GPU. Chosen positions are not supported.
    """
    assert places.chosen_BQK is None, "tables choose another kernel for chosen positions"
    num_blocks, num_queries, num_heads, width = queries_BQHh.shape
    num_kv, page_size = kv_pages.shape[2], kv_pages.shape[1]
    values = latent_width or value_width or width
    sizes = _sizes(
        (width, values, 0 if latent_width else width),
        num_rows=num_queries * num_heads // num_kv,
        num_programs=num_blocks * num_kv,
        num_keys=places.page_table_BP.shape[1] * page_size,
        page_size=page_size,
    )
    dtype = jnp.float32 if kv_pages.dtype == jnp.float32 else jnp.bfloat16
    found = _call(queries_BQHh.astype(dtype), kv_pages, places, config, sizes, interpret)
    out_BQHv = _sum_of_shares(*found, sinks_H)
    return out_BQHv.astype(queries_BQHh.dtype)


def attend_or_choose(
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    block_size: int = 0,
    interpret: bool = False,
    **knobs: Any,
) -> jax.Array:
    """Attend by the kernel, and chosen positions by XLA (`reference.attention.attend`)."""
    if places.chosen_BQK is None:
        return attend(queries_BQHh, kv_pages, places, **knobs, interpret=interpret)
    return reference.attend(queries_BQHh, kv_pages, places, **knobs, block_size=block_size)


def _sizes(widths: tuple[int, int, int], *, num_rows: int, num_programs: int, num_keys: int, page_size: int) -> Sizes:
    """Return the sizes for keys, values and their place, and for `num_rows` queries in `num_programs` heads."""
    width, values, values_at = widths
    is_wide = width > 256
    rows = min(MAX_ROWS, max(MIN_SIZE, power_of_two(num_rows)))
    keys = 64 if rows <= 32 and not is_wide else 32
    num_shares = MAX_PROGRAMS // max(1, num_programs * cdiv(num_rows, rows))
    shares = max(1, min(num_shares, cdiv(num_keys, keys)))
    shares = 1 << (shares.bit_length() - 1)
    warps, stages = (8, 2) if is_wide else (4, 3)
    return Sizes(width, values, values_at, rows, keys, shares, page_size, warps, stages)


def _call(
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    config: ScoreConfig,
    sizes: Sizes,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return values [S, B, Q, H, v], the largest score and the sum of weights of each share, all float32."""
    num_blocks, num_queries, num_heads, width = queries_BQHh.shape
    num_kv, table_BP = kv_pages.shape[2], places.page_table_BP
    num_rows, shape = num_blocks * num_queries * num_heads, (sizes.shares, num_blocks, num_queries, num_heads)
    out, largest, weight = pl.pallas_call(
        partial(_attend, sizes=sizes, config=config, num_queries=num_queries, num_heads=num_heads),
        grid=(num_blocks * num_kv, cdiv(num_queries * num_heads // num_kv, sizes.rows), sizes.shares),
        out_shape=[
            jax.ShapeDtypeStruct((sizes.shares, num_rows, sizes.values), jnp.float32),
            jax.ShapeDtypeStruct((sizes.shares, num_rows), jnp.float32),
            jax.ShapeDtypeStruct((sizes.shares, num_rows), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name="gpu_paged_attention",
    )(
        queries_BQHh.reshape(num_rows, width),
        places.positions_BQ.astype(jnp.int32),
        table_BP.astype(jnp.int32),
        kv_pages.reshape(-1, *kv_pages.shape[2:]),
    )
    return out.reshape(*shape, sizes.values), largest.reshape(shape), weight.reshape(shape)


def _attend(*refs: Any, sizes: Sizes, config: ScoreConfig, num_queries: int, num_heads: int) -> None:
    """Attend the queries of a part, all of a KV head, to the keys of a share."""
    queries, positions_BQ, pages, pool, out, largest, weight = refs
    num_kv, dtype = pool.shape[1], queries.dtype
    block, head, share = pl.program_id(0) // num_kv, pl.program_id(0) % num_kv, pl.program_id(2)
    group, scale = num_heads // num_kv, config.scale_for(sizes.width)
    # The rows of a KV head: the query heads of its group, query by query.
    numbers_M = pl.program_id(1) * sizes.rows + jnp.arange(sizes.rows)
    is_row, query_M = numbers_M < num_queries * group, numbers_M // group
    rows_M = (block * num_queries + query_M) * num_heads + head * group + numbers_M % group
    positions = plgpu.load(positions_BQ.at[jnp.broadcast_to(block, rows_M.shape), query_M], mask=is_row, other=-1)
    last = jnp.max(positions) + 1
    first = jnp.zeros_like(last)
    if config.window:
        first = jnp.maximum(jnp.min(jnp.where(positions >= 0, positions, FAR)) - config.window + 1, 0)
    key_parts, value_parts = parts_of(sizes.width), parts_of(sizes.values)
    queries_of = [
        plgpu.load(at_rows(queries, rows_M, first=at, size=size), mask=is_row[:, None], other=0.0)
        for at, size in key_parts
    ]
    first_span, num_spans = first // sizes.keys, (last + sizes.keys - 1) // sizes.keys
    per_share = (num_spans - first_span + sizes.shares - 1) // sizes.shares
    begin = first_span + share * per_share

    def load(rows: jax.Array, at: int, size: int, is_there: jax.Array) -> jax.Array:
        found = plgpu.load(at_rows(pool, rows, head, first=at, size=size), mask=is_there[:, None], other=0.0)
        return found.astype(dtype)

    def visit(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        totals, best, weight_M = carry
        at = i * sizes.keys + jnp.arange(sizes.keys)
        # A weight of zero does not silence what an earlier owner of a page left ahead of a window: 0 * NaN is NaN.
        is_there = (at >= first) & (at < last)
        page_at = pages.at[jnp.broadcast_to(block, at.shape), at // sizes.page_size]
        rows = plgpu.load(page_at, mask=is_there, other=0) * sizes.page_size + at % sizes.page_size
        scores = _score(queries_of, [load(rows, start, size, is_there) for start, size in key_parts], scale, config)
        sees = at[None, :] <= positions[:, None]
        if config.window:
            sees &= at[None, :] > positions[:, None] - config.window
        scores = jnp.where(sees, scores, MASKED)
        new = jnp.maximum(best, jnp.max(scores, axis=1))
        shrink = jnp.exp(best - new)
        weights = jnp.where(sees, jnp.exp(scores - new[:, None]), 0.0)
        rounded = weights.astype(dtype)
        added = [product(rounded, load(rows, sizes.values_at + start, size, is_there)) for start, size in value_parts]
        totals = tuple(total * shrink[:, None] + more for total, more in zip(totals, added, strict=True))
        return totals, new, weight_M * shrink + jnp.sum(weights, axis=1)

    nothing = tuple(jnp.zeros((sizes.rows, size), jnp.float32) for _, size in value_parts)
    start = nothing, jnp.full((sizes.rows,), MASKED, jnp.float32), jnp.zeros((sizes.rows,), jnp.float32)
    totals, best, weight_M = jax.lax.fori_loop(begin, jnp.minimum(begin + per_share, num_spans), visit, start)
    shares_M = jnp.broadcast_to(share, rows_M.shape)
    for (at, size), total in zip(value_parts, totals, strict=True):
        place = out.at[shares_M[:, None], rows_M[:, None], (at + jnp.arange(size))[None, :]]
        plgpu.store(place, total, mask=jnp.broadcast_to(is_row[:, None], total.shape))
    plgpu.store(largest.at[shares_M, rows_M], best, mask=is_row)
    plgpu.store(weight.at[shares_M, rows_M], weight_M, mask=is_row)


def _score(queries: list[jax.Array], keys: list[jax.Array], scale: float, config: ScoreConfig) -> jax.Array:
    """Return the scores of queries and keys by the parts of their width, float32."""
    made = [product(part, key, transposed=True) for part, key in zip(queries, keys, strict=True)]
    scores = sum(made[1:], made[0]) * scale
    return config.soft_cap * jnp.tanh(scores / config.soft_cap) if config.soft_cap else scores


def _sum_of_shares(
    out_SBQHv: jax.Array, largest_SBQH: jax.Array, weight_SBQH: jax.Array, sinks_H: jax.Array | None
) -> jax.Array:
    """Return the weighted mean of the values of all shares, float32 [B, Q, H, v]; zeros for rows that see nothing."""
    best = jnp.max(largest_SBQH, axis=0)
    if sinks_H is not None:
        best = jnp.maximum(best, sinks_H.astype(jnp.float32))
    factor = jnp.exp(largest_SBQH - best)
    weight = jnp.sum(weight_SBQH * factor, axis=0)
    if sinks_H is not None:
        weight += jnp.exp(sinks_H.astype(jnp.float32) - best)
    out = jnp.sum(out_SBQHv * factor[..., None], axis=0)
    return out / jnp.where(weight == 0, 1.0, weight)[..., None]
