"""Block-sparse attention over a pool of packed rows (`tpu.packed_rows`): by the paged kernel, or by XLA.

The blocks that a single token sees are pages of its sequence. A page table of these pages alone turns it into dense
attention over them: the token's own block is the last one, so it sees all keys ahead of it. The kernel reads all pages
for prompts, under a mask (`tpu.paged_choice`).
"""

# B query blocks or single tokens   Q queries per block   H query heads   G KV heads   R query heads of a KV head
# h head width   v value width   P page-table width   K chosen blocks   S positions   C sets   X lanes of a row

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.reference.attention import BlockPlaces, ScoreConfig, attend
from rayserve_moe.kernels.tpu import paged_attention
from rayserve_moe.kernels.tpu.packed_rows import LANES, heads_of_a_set, layout_of
from rayserve_moe.kernels.tpu.paged_attention import unsupported_pages


def attend_single_tokens(
    queries_B1Hh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    block_size: int,
    interpret: Any = False,
    **knobs: Any,
) -> jax.Array:
    """Attend single tokens to chosen blocks by the kernel, the last of them their own, as `attend_chosen_blocks`."""
    assert places.chosen_BQK is not None, "an index chooses blocks for each KV head"
    chosen_BGK, positions_B1, pages_each = places.chosen_BQK[:, 0], places.positions_BQ, block_size // kv_pages.shape[1]
    num_tokens, num_kv_heads, num_chosen = chosen_BGK.shape
    before_BG = jnp.sum(chosen_BGK >= 0, axis=-1) - 1
    seen_BG = jnp.where(positions_B1 >= 0, before_BG * block_size + positions_B1 % block_size, -1)
    numbers_BGP = jnp.maximum(chosen_BGK, 0)[..., None] * pages_each + jnp.arange(pages_each)
    numbers_BGP = numbers_BGP.reshape(num_tokens, num_kv_heads, num_chosen * pages_each)
    tables_BGP = jnp.take_along_axis(places.page_table_BP[:, None], numbers_BGP, axis=2, mode="clip")
    of_heads = BlockPlaces(tables_BGP.reshape(-1, numbers_BGP.shape[2]), seen_BG.reshape(-1, 1))
    queries = jnp.repeat(queries_B1Hh, num_kv_heads, axis=0)
    attended = paged_attention.attend(queries, kv_pages, of_heads, interpret=interpret, **knobs)
    attended_BGGRv = attended.reshape(num_tokens, num_kv_heads, num_kv_heads, -1, attended.shape[-1])
    own_BRvG = jnp.diagonal(attended_BGGRv, axis1=1, axis2=2)
    return jnp.moveaxis(own_BRvG, -1, 1).reshape(num_tokens, 1, -1, attended.shape[-1])


def attend_chosen_blocks(  # noqa: PLR0913 (the reference's signature)
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    config: ScoreConfig,
    value_width: int,
    block_size: int,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Attend by XLA as `reference.attention.attend` to chosen blocks, over rows [N, page, X] of `packed_kv`."""
    assert places.chosen_BQK is not None, "an index chooses blocks for each KV head"
    num_kv_heads, head_dim = places.chosen_BQK.shape[2], queries_BQHh.shape[-1]
    unpack = partial(unpacked_kv, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_width or head_dim)
    return attend(
        queries_BQHh,
        kv_pages,
        places,
        config=config,
        sinks_H=sinks_H,
        value_width=value_width,
        block_size=block_size,
        unpack=unpack,
    )


def unpacked_kv(rows_SX: jax.Array, *, num_kv_heads: int, head_dim: int, value_dim: int) -> jax.Array:
    """Return the keys and values of packed rows, [S, G, h + v]."""
    layout = layout_of(rows_SX.shape[-1], head_dim, value_width=value_dim)
    rows_SCX = rows_SX.reshape(len(rows_SX), layout.num_sets, layout.set_lanes)
    num_copies = layout.num_sets * layout.set_heads // num_kv_heads

    def heads(first: int, width: int) -> jax.Array:
        lanes_SCX = rows_SCX[..., first : first + layout.set_heads * width]
        return lanes_SCX.reshape(len(rows_SX), -1, width)[:, ::num_copies]

    return jnp.concatenate([heads(0, head_dim), heads(layout.values_at, value_dim)], axis=-1)


def unsupported_by_kernel(pool: PoolFormat, *, head_dim: int, value_dim: int, block_size: int) -> str:
    """Return why the kernel does not take a pool, or heads and blocks of these sizes; empty if it does."""
    if pool.is_8_bit:
        return "kv_cache_dtype fp8 does not store the keys of an index"
    if block_size != LANES or block_size % pool.page_size:
        return f"blocks of {block_size} in pages of {pool.page_size}, not of {LANES} in pages that divide it"
    if heads_of_a_set(head_dim, value_dim) > 1:
        return f"heads of {head_dim} elements share registers, and a choice serves one"
    return unsupported_pages(pool)


def unsupported_blocks(pool: PoolFormat, *, head_dim: int, value_dim: int, block_size: int) -> str:
    """Return why XLA does not take a pool; empty if it does."""
    del head_dim, value_dim, block_size
    if pool.is_8_bit:
        return "kv_cache_dtype fp8 does not store the keys of an index"
    return unsupported_pages(pool)
