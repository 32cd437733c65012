"""Paged attention on TPU: jax's ragged paged attention kernel behind the signature of the reference.

Single tokens and prompts have a function each, because their blocks are cut differently. Beyond the reference, both
need the real tokens of a block first and at consecutive positions.

The kernel takes queries as runs of rows. A run has the pages of its keys and their number; its last row stands at its
last key. A block of queries becomes a run, and neighbouring blocks of one prompt share one as long as it fits. Where a
window limits how far queries see, a run gets only the pages within reach, so that its cost does not grow with the
sequence.

    rows | block 0 | block 1 ..padding | block 2 ..padding |
    runs | run 0             | run 1             | not computed

Padding ahead of a run gives rows that are thrown away.
"""

# B query blocks   Q queries per block   H query heads   h head width   P page-table width
# S runs (as many as blocks)   W pages within reach of a run

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, ScoreConfig, Together
from rayserve_moe.kernels.tpu.attention_blocks import (
    AttentionShape,
    KernelBlocks,
    decode_blocks,
    prefill_blocks,
    sequences_per_call,
)
from rayserve_moe.kernels.tpu.flat_rows import LANES


@dataclass(frozen=True)
class RunKernel:
    """A kernel, and the most rows it wants in a run.

    It takes queries [rows, H, h], the pool, the fields of Runs, and by keyword what jax's kernel calls `sm_scale`,
    `sliding_window`, `soft_cap`, `k_scale`, `v_scale`; it returns [rows, H, h].
    """

    call: Callable[..., jax.Array]
    most_rows: int


class RunLengths(NamedTuple):
    """What positions alone say of runs: the fields of Runs, and the first page of its sequence that each run sees."""

    kv_lens_S: jax.Array
    first_page_S: jax.Array
    row_borders: jax.Array
    num_1: jax.Array


class Runs(NamedTuple):
    """The first `num_1[0]` of S runs count. All int32.

    Run s takes the rows from `row_borders[s]` to `row_borders[s + 1]` (S + 1 entries) and sees the `kv_lens_S[s]` keys
    on its pages.
    """

    kv_lens_S: jax.Array
    page_table_SW: jax.Array
    row_borders: jax.Array
    num_1: jax.Array


def unsupported_reason(_: PoolFormat, *, head_dim: int, has_sinks: bool) -> str:
    """Return why jax's kernel does not take a model; empty if it does."""
    if has_sinks:
        return "attention has sinks"
    if head_dim % LANES:
        return f"heads of {head_dim} elements are no multiple of {LANES}"
    return ""


def attend(
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    config: ScoreConfig = FULL_CAUSAL,
    choose_blocks: Callable[..., KernelBlocks],
) -> jax.Array:
    """Attend as `reference.attention.attend` does, in blocks that `choose_blocks` cuts for these shapes and this chip.

    ValueError for what the kernel cannot do (see `attend_runs`), and for a chip without block sizes.
    """
    (_, num_queries, num_heads, width), (_, page_size, num_kv, _) = queries_BQHh.shape, kv_pages.shape
    kv_size, table_width = kv_pages.dtype.itemsize, places.page_table_BP.shape[1]
    shape = AttentionShape(num_heads, num_kv // 2, width, page_size, table_width, kv_size)
    blocks = choose_blocks(shape, chip=str(pltpu.get_tpu_info().chip_version))
    rows = num_queries * max(1, blocks.num_queries // num_queries) if num_queries > 1 else 1
    num_pages = min(blocks.num_pages, pages_within_reach(table_width, page_size, config, most_rows=rows))
    kernel = partial(
        ragged_paged_attention,
        num_kv_pages_per_block=num_pages,
        num_queries_per_block=blocks.num_queries,
        vmem_limit_bytes=blocks.vmem_limit_bytes,
    )
    kernel = RunKernel(kernel, rows)
    return attend_runs(queries_BQHh, kv_pages, places, config=config, kernel=kernel)


attend_decode = partial(attend, choose_blocks=decode_blocks)
"""In blocks cut for one query per sequence."""
attend_prefill = partial(attend, choose_blocks=prefill_blocks)
"""In blocks cut for prompts."""


def attend_runs(
    queries_BQHh: jax.Array, kv_pages: jax.Array, places: BlockPlaces, *, config: ScoreConfig, kernel: RunKernel
) -> jax.Array:
    """Cut the blocks into runs, call the kernel for as many at once as its scalar memory holds, and zero padding.

    The real tokens of a block come first and stand at consecutive positions. What `describe_singles` gave is taken as
    it is, and padding stays undefined then. Returns [B, Q, H, h]. ValueError where 8-bit KV has an odd number of KV
    heads.
    """
    _refuse_unfit(kv_pages)
    (page_table_BP, positions_BQ, described, _), (num_blocks, num_queries, *head_shape) = places, queries_BQHh.shape
    page_size, is_quantised = kv_pages.shape[1], kv_pages.dtype.itemsize == 1
    scale = 1.0 if is_quantised else None
    reach = pages_within_reach(page_table_BP.shape[1], page_size, config, most_rows=kernel.most_rows)
    blocks_per_cell = kernel.most_rows // num_queries
    per_call = max(1, sequences_per_call(reach) // blocks_per_cell) * blocks_per_cell
    parts = []
    for call, first in enumerate(range(0, num_blocks, per_call)):
        part = slice(first, min(first + per_call, num_blocks))
        if described is None:
            runs = runs_of(page_table_BP[part], positions_BQ[part], page_size, config, most_rows=kernel.most_rows)
        else:
            assert kernel.most_rows == 1, "single tokens are described as runs of one row"
            runs = _on_pages(described[call], page_table_BP[part], reach)
        attended = kernel.call(
            queries_BQHh[part].reshape(-1, *head_shape),
            kv_pages,
            *runs,
            sm_scale=config.scale_for(head_shape[-1]),
            sliding_window=config.window or None,
            soft_cap=config.soft_cap or None,
            k_scale=scale,
            v_scale=scale,
        )
        parts.append(attended.reshape(-1, num_queries, *head_shape))
    attended_BQHh = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    if described is not None:
        return attended_BQHh
    return jnp.where((positions_BQ >= 0)[..., None, None], attended_BQHh, 0)


def describe_singles(
    positions_U: jax.Array,
    *,
    page_size: int,
    table_width: int,
    windows: Iterable[int],
    together: Together | None = None,
) -> dict[int, tuple[RunLengths, ...]]:
    """Return the runs of single tokens but for their pages, for each call of the kernel, by window (0: none).

    They are the same for all layers; XLA computes them anew in each where a loop over layers has them inside.
    """
    assert together is None, "this kernel knows no tokens of one sequence"

    def of_window(window: int) -> tuple[RunLengths, ...]:
        config = ScoreConfig(window=window)
        per_call = sequences_per_call(pages_within_reach(table_width, page_size, config, most_rows=1))
        calls = (positions_U[first : first + per_call] for first in range(0, len(positions_U), per_call))
        return tuple(_lengths_of_singles(call_S, page_size, config) for call_S in calls)

    return {window: of_window(window) for window in set(windows)}


def runs_of(
    page_table_BP: jax.Array, positions_BQ: jax.Array, page_size: int, config: ScoreConfig, *, most_rows: int
) -> Runs:
    """Describe blocks as runs of at most `most_rows` rows, a multiple of Q; there is always one that counts.

    The real tokens of a block come first and stand at consecutive positions. A run continues into the next block where
    that continues the prompt and lies in the same cell of `most_rows` rows.
    """
    num_blocks, num_queries = positions_BQ.shape
    reach = pages_within_reach(page_table_BP.shape[1], page_size, config, most_rows=most_rows)
    if most_rows == 1:
        return _on_pages(_lengths_of_singles(positions_BQ[:, 0], page_size, config), page_table_BP, reach)
    first_B, blocks_B = positions_BQ[:, 0], jnp.arange(num_blocks, dtype=jnp.int32)
    last_B = first_B + jnp.sum(positions_BQ >= 0, axis=1, dtype=jnp.int32) - 1
    row_end_B = blocks_B * num_queries + last_B - first_B + 1
    is_end_B = (first_B >= 0) & ~_continues(page_table_BP, first_B, last_B, num_queries, most_rows)
    if num_queries > 1:
        runs_so_far_B = jnp.cumsum(is_end_B)
        # Moves the ends to the front, in their order; what follows them does not count.
        block_S = jnp.searchsorted(runs_so_far_B, jnp.arange(1, num_blocks + 1), method="compare_all")
        last_S, row_end_S = (array_B.at[block_S].get(mode="clip") for array_B in (last_B, row_end_B))
        page_table_SP, num_runs = page_table_BP.at[block_S].get(mode="clip"), runs_so_far_B[-1]
    else:
        last_S, row_end_S, page_table_SP = last_B, row_end_B, page_table_BP
        num_runs = jnp.max(jnp.where(is_end_B, blocks_B + 1, 0))
    first_page_S = _first_pages(last_S, page_size, config, most_rows=most_rows)
    lengths = RunLengths(
        jnp.maximum(last_S + 1 - first_page_S * page_size, 1),
        first_page_S,
        jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.maximum(row_end_S, 1)]),
        jnp.maximum(num_runs, 1).astype(jnp.int32).reshape(1),
    )
    return _on_pages(lengths, page_table_SP, reach)


def _lengths_of_singles(positions_S: jax.Array, page_size: int, config: ScoreConfig) -> RunLengths:
    """Each token is a run, which ends with its row; padding is a run without rows, but that of the first row."""
    rows_S = jnp.arange(len(positions_S), dtype=jnp.int32)
    row_end_S = jnp.maximum(jnp.where(positions_S >= 0, rows_S + 1, rows_S), 1)
    first_page_S = _first_pages(positions_S, page_size, config, most_rows=1)
    num_runs = jnp.max(jnp.where(positions_S >= 0, rows_S + 1, 1))
    return RunLengths(
        jnp.maximum(positions_S + 1 - first_page_S * page_size, 1),
        first_page_S,
        jnp.concatenate([jnp.zeros(1, jnp.int32), row_end_S]),
        num_runs.reshape(1),
    )


def _first_pages(last_S: jax.Array, page_size: int, config: ScoreConfig, *, most_rows: int) -> jax.Array:
    """The first page within reach of a run of `most_rows` rows whose last one stands at `last_S`."""
    if not config.window:
        return jnp.zeros_like(last_S)
    return jnp.maximum(last_S - most_rows - config.window + 2, 0) // page_size


def _on_pages(lengths: RunLengths, page_table_SP: jax.Array, reach: int) -> Runs:
    kv_lens_S, first_page_S, row_borders, num_1 = lengths
    all_within = reach == page_table_SP.shape[1]
    return Runs(
        kv_lens_S,
        page_table_SP if all_within else _pages_from(page_table_SP, first_page_S, reach),
        row_borders,
        num_1,
    )


def pages_within_reach(table_width: int, page_size: int, config: ScoreConfig, *, most_rows: int) -> int:
    """Pages that a run of `most_rows` rows can see, of the `table_width` that its sequence may have."""
    if not config.window:
        return table_width
    return min(table_width, -(-(most_rows + config.window - 2) // page_size) + 1)


def _continues(
    page_table_BP: jax.Array, first_B: jax.Array, last_B: jax.Array, num_queries: int, most_rows: int
) -> jax.Array:
    """Whether the next block holds the tokens that follow, in the same cell of rows, bool [B].

    Blocks with equal tables see the same keys, so they may share a run even of different sequences.
    """
    blocks_per_cell = most_rows // num_queries
    if blocks_per_cell == 1:
        return jnp.zeros(first_B.shape, bool)
    is_full_B = last_B - first_B + 1 == num_queries
    next_first_B = jnp.concatenate([first_B[1:], jnp.full(1, -1, first_B.dtype)])
    same_pages_B = jnp.all(page_table_BP == jnp.roll(page_table_BP, -1, axis=0), axis=1)
    inside_cell_B = (jnp.arange(len(first_B)) + 1) % blocks_per_cell != 0
    return is_full_B & (next_first_B == last_B + 1) & same_pages_B & inside_cell_B


def _pages_from(page_table_SP: jax.Array, first_page_S: jax.Array, reach: int) -> jax.Array:
    """`reach` pages of every run from its first one on, [S, W]; beyond its table the last page is repeated."""
    place_SW = jnp.minimum(first_page_S[:, None] + jnp.arange(reach), page_table_SP.shape[1] - 1)
    return jnp.take_along_axis(page_table_SP, place_SW, axis=1)


def _refuse_unfit(kv_pages: jax.Array) -> None:
    num_kv = kv_pages.shape[2]
    if kv_pages.dtype.itemsize == 1 and num_kv % 4:
        raise ValueError(
            f"8-bit KV needs an even number of KV heads on a device, found {num_kv // 2}; use bfloat16 KV or fewer "
            "devices on the tensor axis"
        )
