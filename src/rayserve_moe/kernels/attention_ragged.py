"""Paged attention on TPU: jax's ragged paged attention kernel behind the signature of the reference.

Single tokens and prompts have a function each, because their blocks are cut differently. Beyond the reference, both
need the real tokens of a block first and at consecutive positions.
"""

# B query blocks   Q queries per block   H query heads   h head width   P page-table width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from rayserve_moe.kernels.attention_blocks import (
    AttentionShape,
    KernelBlocks,
    decode_blocks,
    prefill_blocks,
    sequences_per_call,
)
from rayserve_moe.kernels.attention_reference import ScoreConfig
from rayserve_moe.kernels.attention_runs import pages_within_reach, runs_of


@dataclass(frozen=True)
class RunKernel:
    """A kernel, and the most rows it wants in a run.

    It takes queries [rows, H, h], the pool, the fields of Runs, and by keyword what jax's kernel calls `sm_scale`,
    `sliding_window`, `soft_cap`, `k_scale`, `v_scale`; it returns [rows, H, h].
    """

    call: Callable[..., jax.Array]
    most_rows: int


def attend(
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    page_table_BP: jax.Array,
    positions_BQ: jax.Array,
    *,
    config: ScoreConfig,
    choose_blocks: Callable[..., KernelBlocks],
) -> jax.Array:
    """Attend as `attention_reference.attend` does, in blocks that `choose_blocks` cuts for these shapes and this chip.

    ValueError for what the kernel cannot do (see `attend_runs`), and for a chip without block sizes.
    """
    (_, num_queries, num_heads, width), (_, page_size, num_kv, _) = queries_BQHh.shape, kv_pages.shape
    kv_size = kv_pages.dtype.itemsize
    shape = AttentionShape(num_heads, num_kv // 2, width, page_size, page_table_BP.shape[1], kv_size)
    blocks = choose_blocks(shape, chip=str(pltpu.get_tpu_info().chip_version))
    rows = num_queries * max(1, blocks.num_queries // num_queries) if num_queries > 1 else 1
    num_pages = min(blocks.num_pages, pages_within_reach(page_table_BP.shape[1], page_size, config, most_rows=rows))
    kernel = partial(
        ragged_paged_attention,
        num_kv_pages_per_block=num_pages,
        num_queries_per_block=blocks.num_queries,
        vmem_limit_bytes=blocks.vmem_limit_bytes,
    )
    kernel = RunKernel(kernel, rows)
    return attend_runs(queries_BQHh, kv_pages, page_table_BP, positions_BQ, config=config, kernel=kernel)


attend_decode = partial(attend, choose_blocks=decode_blocks)
"""In blocks cut for one query per sequence."""
attend_prefill = partial(attend, choose_blocks=prefill_blocks)
"""In blocks cut for prompts."""


def attend_runs(
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    page_table_BP: jax.Array,
    positions_BQ: jax.Array,
    *,
    config: ScoreConfig,
    kernel: RunKernel,
) -> jax.Array:
    """Cut the blocks into runs, call the kernel for as many at once as its scalar memory holds, and zero padding.

    The real tokens of a block come first and stand at consecutive positions. Returns [B, Q, H, h]. ValueError where
    8-bit KV has an odd number of KV heads.
    """
    _refuse_unfit(kv_pages)
    num_blocks, num_queries, *head_shape = queries_BQHh.shape
    page_size, is_quantised = kv_pages.shape[1], kv_pages.dtype.itemsize == 1
    scales = {"k_scale": 1.0, "v_scale": 1.0} if is_quantised else {}
    reach = pages_within_reach(page_table_BP.shape[1], page_size, config, most_rows=kernel.most_rows)
    blocks_per_cell = kernel.most_rows // num_queries
    per_call = max(1, sequences_per_call(reach) // blocks_per_cell) * blocks_per_cell
    parts = []
    for first in range(0, num_blocks, per_call):
        part = slice(first, min(first + per_call, num_blocks))
        runs = runs_of(page_table_BP[part], positions_BQ[part], page_size, config, most_rows=kernel.most_rows)
        attended = kernel.call(
            queries_BQHh[part].reshape(-1, *head_shape),
            kv_pages,
            *runs,
            sm_scale=config.scale_for(head_shape[-1]),
            sliding_window=config.window or None,
            soft_cap=config.soft_cap or None,
            **scales,
        )
        parts.append(attended.reshape(-1, num_queries, *head_shape))
    attended_BQHh = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return jnp.where((positions_BQ >= 0)[..., None, None], attended_BQHh, 0)


def _refuse_unfit(kv_pages: jax.Array) -> None:
    num_kv = kv_pages.shape[2]
    if kv_pages.dtype.itemsize == 1 and num_kv % 4:
        raise ValueError(
            f"8-bit KV needs an even number of KV heads on a device, found {num_kv // 2}; use bfloat16 KV or fewer "
            "devices on the tensor axis"
        )
