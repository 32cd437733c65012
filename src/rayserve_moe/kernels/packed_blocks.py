"""Block-sparse attention by XLA over a pool of packed rows (`tpu.packed_rows`)."""

# S positions   C sets   P KV heads of a set   G KV heads   h head width   v value width   X lanes of a row

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.reference.attention import BlockPlaces, ScoreConfig, attend
from rayserve_moe.kernels.tpu.packed_rows import layout_of
from rayserve_moe.kernels.tpu.paged_attention import unsupported_pages


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
    """Attend as `reference.attention.attend` to chosen blocks, over rows [N, page, X] of `packed_rows.packed_kv`."""
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


def unsupported_blocks(pool: PoolFormat, *, head_dim: int, value_dim: int, block_size: int) -> str:
    """Return why block-sparse attention does not take a pool; empty if it does."""
    del head_dim, value_dim, block_size
    return "kv_cache_dtype fp8 does not store the keys of an index" if pool.is_8_bit else unsupported_pages(pool)
