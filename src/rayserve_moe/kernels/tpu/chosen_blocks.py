"""Block-sparse attention by the paged kernel: single tokens read chosen blocks only, prompts read all under a mask.

The blocks that a single token sees are pages of its sequence. A page table of these pages alone turns it into dense
attention over them: the token's own block is the last one, so all keys ahead of it are seen. Prompts: see
`paged_choice`.
"""

# B single tokens   H query heads   G KV heads   R query heads of a KV head   h head width   v value width
# P page-table width   K chosen blocks

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.reference.attention import BlockPlaces
from rayserve_moe.kernels.tpu import paged_attention
from rayserve_moe.kernels.tpu.packed_rows import LANES, heads_of_a_set


def unsupported_reason(pool: PoolFormat, *, head_dim: int, value_dim: int, block_size: int) -> str:
    """Return why the kernel does not take a pool, or heads and blocks of these sizes; empty if it does."""
    if pool.is_8_bit:
        return "kv_cache_dtype fp8 does not store the keys of an index"
    if block_size != LANES or block_size % pool.page_size:
        return f"blocks of {block_size} in pages of {pool.page_size}, not of {LANES} in pages that divide it"
    if heads_of_a_set(head_dim, value_dim) > 1:
        return f"heads of {head_dim} elements share registers, and a choice serves one"
    return paged_attention.unsupported_pages(pool)


def attend_chosen_blocks(
    queries_B1Hh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    block_size: int,
    interpret: Any = False,
    **knobs: Any,
) -> jax.Array:
    """Attend single tokens to chosen blocks, the last of them their own, as `reference.attention.attend`."""
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
