"""Products of the kernel `pushed_experts`: the rows of a slot by its weights, which are read ahead of their use.

An expert that the core's memory can hold twice is read whole, and its rows are multiplied where they lie. A larger one
is read in blocks of its width, and the products of all blocks are added up. Its rows wait in HBM, for those of such
models are wide, and are taken from there in groups, for each of which the weights are read once.

    | block 0 | block 1 | block 2 |  of group 0, then of group 1 or of the next slot; while one is multiplied
              | block 1 | block 2 | block 0 |                                        the next one is read
"""

# D model width   F expert width   B block of F   X layers * S   S local slots   M rows of a tile   R rows of a group

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.narrow_weights import SCALE_BLOCK, held_product
from rayserve_moe.kernels.reference.expert_products import ACTIVATIONS
from rayserve_moe.kernels.tpu.pushed_rows import as_words, halves, rows_at, wait_for
from rayserve_moe.kernels.tpu.pushed_sizes import GROUP_ROWS, LANES, TILE_ROWS, PushSizes, Refs


def begin_weights(refs: Refs, sizes: PushSizes, me: jax.Array) -> None:
    """Find the next slot with rows from each slot on, and begin to read the weights of the first one."""
    refs.next_s[sizes.num_slots] = sizes.num_slots

    def find(k: jax.Array, _: None) -> None:
        slot = sizes.num_slots - 1 - k
        num_rows = refs.table_s[3 * sizes.num_ranks, me * sizes.num_slots + slot]
        refs.next_s[slot] = jnp.where(num_rows > 0, slot, refs.next_s[slot + 1])

    jax.lax.fori_loop(0, sizes.num_slots, find, None)
    _read_weights(refs, sizes, refs.next_s[0], jnp.int32(0), half=jnp.int32(0))


def multiply_slot(refs: Refs, sizes: PushSizes, me: jax.Array, slot: jax.Array, turn: jax.Array) -> jax.Array:
    """Multiply the rows of a slot: results take their places. Counts on how many blocks of weights were used."""
    lane = me * sizes.num_slots + slot
    num_rows, begin = refs.table_s[3 * sizes.num_ranks, lane], refs.table_s[3 * sizes.num_ranks + 1, lane]
    if not sizes.is_streamed:

        @pl.when(num_rows > 0)
        def _() -> None:
            half = _next_weights(refs, sizes, slot, jnp.int32(0), refs.next_s[slot + 1], turn=turn)
            wait_for(refs.here, num_rows, refs.arrived_S.at[slot], sizes)
            _for_tiles(num_rows, lambda i: _multiply_tile(refs, sizes, begin + i * TILE_ROWS, half))

        return turn + jnp.where(num_rows > 0, 1, 0)
    num_steps = pl.cdiv(num_rows, GROUP_ROWS) * sizes.num_blocks

    def multiply_block(step: jax.Array, turn: jax.Array) -> jax.Array:
        group, block = jax.lax.div(step, sizes.num_blocks), jax.lax.rem(step, sizes.num_blocks)
        number = jnp.minimum(num_rows - group * GROUP_ROWS, GROUP_ROWS)
        waiting = rows_at(refs.here, begin + group * GROUP_ROWS, number, sizes)
        held = rows_at(refs.held, jnp.int32(0), number, sizes)
        after = jnp.where(step == num_steps - 1, refs.next_s[slot + 1], slot)
        half = _next_weights(refs, sizes, slot, block, after, turn=turn)
        wait_for(refs.here, jnp.where(step == 0, num_rows, 0), refs.arrived_S.at[slot], sizes)
        pl.when(block == 0)(partial(_copy, waiting, held, refs))
        _for_tiles(number, lambda i: _multiply_tile(refs, sizes, i * TILE_ROWS, half, block))
        pl.when(block == sizes.num_blocks - 1)(partial(_copy, held, waiting, refs))
        return turn + 1

    return jax.lax.fori_loop(0, num_steps, multiply_block, turn)


def _copy(rows: Any, to: Any, refs: Refs) -> None:
    copy = pltpu.make_async_copy(rows, to, refs.counted.at[2])
    copy.start()
    copy.wait()


def _for_tiles(num_rows: jax.Array, run: Any) -> None:
    jax.lax.fori_loop(0, pl.cdiv(num_rows, TILE_ROWS), lambda i, _: run(i), None)


def _next_weights(
    refs: Refs, sizes: PushSizes, slot: jax.Array, block: jax.Array, after: jax.Array, *, turn: jax.Array
) -> jax.Array:
    """Wait for a block of a slot's weights and begin to read the one after it; returns the half that it is in.

    After the last block comes the first one of the slot `after`.
    """
    half, is_last = jax.lax.rem(turn, 2), block == sizes.num_blocks - 1
    for copy in _weight_copies(refs, sizes, slot, block, half=half):
        copy.wait()
    _read_weights(refs, sizes, jnp.where(is_last, after, slot), jnp.where(is_last, 0, block + 1), half=1 - half)
    return half


def _read_weights(refs: Refs, sizes: PushSizes, slot: jax.Array, block: jax.Array, *, half: jax.Array) -> None:
    """Begin to read a block into one of the two halves; there is nothing to read beyond the last slot."""

    @pl.when(slot < sizes.num_slots)
    def _() -> None:
        for copy in _weight_copies(refs, sizes, slot, block, half=half):
            copy.start()


def _weight_copies(refs: Refs, sizes: PushSizes, slot: jax.Array, block: jax.Array, *, half: jax.Array) -> list[Any]:
    index, semaphore = refs.first_s[0] + slot, refs.weights_in.at[half]
    part = pl.ds(pl.multiple_of(block * sizes.block, sizes.block), sizes.block)
    # Of gate and up, and of their scales, a block has columns, of down rows; the scales of down are whole.
    columns, rows, whole = (index, slice(None), part), (index, part), (index,)
    cuts = (columns, columns, rows, columns, columns, whole) if sizes.is_streamed else (whole,) * 6
    triples = zip(refs.weights_X, refs.weights_H, cuts, strict=False)
    return [pltpu.make_async_copy(flat.at[cut], held.at[half], semaphore) for flat, held, cut in triples]


def _multiply_tile(
    refs: Refs, sizes: PushSizes, first: jax.Array, half: jax.Array, block: jax.Array | None = None
) -> None:
    """Multiply the rows of a tile by the weights of a half: all of an expert, or a block, after the last of which the
    sums of all blocks take the rows' places.
    """
    words, rows = sizes.row_words, refs.here if block is None else refs.held
    pieces = [pl.ds(first * words + q, TILE_ROWS, stride=words) for q in range(words)]
    parts = [halves(rows[piece, :]) for piece in pieces]
    columns = [lower for lower, _ in parts] + [upper for _, upper in parts]
    rows_MD = jnp.concatenate([column.astype(jnp.bfloat16) for column in columns], axis=1)
    gate_MB, up_MB = (_product(rows_MD, refs, place, half) for place in (0, 1))
    inner_MB = ACTIVATIONS[sizes.activation](gate_MB, up_MB).astype(jnp.bfloat16)
    result_MD = _product(inner_MB, refs, 2, half, block)

    def place(result_MD: jax.Array) -> None:
        words_MW = as_words(result_MD.astype(jnp.bfloat16).astype(jnp.float32))
        for q, piece in enumerate(pieces):
            rows[piece, :] = words_MW[:, q * LANES : (q + 1) * LANES]

    if block is None:
        place(result_MD)
        return
    tile = pl.ds(pl.multiple_of(first, TILE_ROWS), TILE_ROWS)
    sums_MD = jnp.where(block == 0, 0.0, refs.sums_RD[tile, :]) + result_MD
    refs.sums_RD[tile, :] = sums_MD
    pl.when(block == sizes.num_blocks - 1)(partial(place, sums_MD))


def _product(rows_MK: jax.Array, refs: Refs, place: int, half: jax.Array, block: jax.Array | None = None) -> jax.Array:
    """Rows times a matrix that is held, and times the scales of its columns if any: float32."""
    matrix_KN, scales = refs.weights_H[place][half], refs.weights_H[3:]
    first = 0 if block is None else block * (matrix_KN.shape[0] // SCALE_BLOCK)
    return held_product(rows_MK, matrix_KN, scales[place].at[half] if scales else None, first=first)
