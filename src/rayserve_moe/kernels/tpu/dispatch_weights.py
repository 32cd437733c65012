"""Copies of weights into the two halves of a core's memory, for the kernel `low_latency_dispatch`.

HBM is never idle between two blocks: the copy of the next block begins before the copy of a block ends.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.tpu.dispatch_sizes import DispatchSizes, Refs

CERTAIN_ROWS = 4
"""Minimum mean number of rows per slot at which at most 2 % of slots have none."""


def early_arrays(sizes: DispatchSizes) -> int:
    """Return the number of slot 0's arrays to read before its number of rows is known.

    All arrays if it almost certainly has rows. Else a single one, whose copy takes about as long as the counts. 0 if
    the last core has no slots.
    """
    if (sizes.num_cores - 1) * sizes.of_core.num_slots >= sizes.num_slots:
        return 0
    return len(sizes.held_weights) if sizes.num_rows >= CERTAIN_ROWS * sizes.num_slots else 1


def begin_weights(refs: Refs, sizes: DispatchSizes, num_early: int) -> None:
    """Begin to read `num_early` arrays of slot 0, before the number of its rows is known."""
    for copy in _first_copies(refs, sizes, slice(num_early)):
        copy.start()


def read_first_weights(refs: Refs, sizes: DispatchSizes, me: jax.Array, num_early: int) -> None:
    """Record the first slot with rows from each slot on, and begin to read the weights of the first slot with rows.

    If that is slot 0, its other arrays follow the early ones. If not, the early ones arrive and are overwritten.
    """
    next_s = refs.tables.next_s
    next_s[sizes.num_slots] = sizes.num_slots

    def find(k: jax.Array, _: None) -> None:
        slot = sizes.num_slots - 1 - k
        num_rows = refs.tables.table_s[3 * sizes.num_ranks, me * sizes.num_slots + slot]
        next_s[slot] = jnp.where(num_rows > 0, slot, next_s[slot + 1])

    jax.lax.fori_loop(0, sizes.num_slots, find, None)

    @pl.when(next_s[0] == 0)
    def _() -> None:
        for copy in _first_copies(refs, sizes, slice(num_early, None)):
            copy.start()

    @pl.when(next_s[0] > 0)
    def _() -> None:
        for copy in _first_copies(refs, sizes, slice(num_early)):
            copy.wait()
        read_weights(refs, sizes, next_s[0], jnp.int32(0), half=jnp.int32(0))


def next_weights(
    refs: Refs, sizes: DispatchSizes, slot: jax.Array, block: jax.Array, after: jax.Array, *, turn: jax.Array
) -> jax.Array:
    """Begin to read the next block, wait for `block` of a slot's weights, and return the half that holds it.

    After the last block comes the first block of the slot `after`.
    """
    half, is_last = jax.lax.rem(turn, 2), block == sizes.num_blocks - 1
    read_weights(refs, sizes, jnp.where(is_last, after, slot), jnp.where(is_last, 0, block + 1), half=1 - half)
    for copy in weight_copies(refs, sizes, slot, block, half=half):
        copy.wait()
    return half


def read_weights(refs: Refs, sizes: DispatchSizes, slot: jax.Array, block: jax.Array, *, half: jax.Array) -> None:
    """Begin to read a block into a half; nothing is read beyond the last slot."""

    @pl.when(slot < sizes.num_slots)
    def _() -> None:
        for copy in weight_copies(refs, sizes, slot, block, half=half):
            copy.start()


def weight_copies(
    refs: Refs,
    sizes: DispatchSizes,
    slot: jax.Array,
    block: jax.Array,
    *,
    half: jax.Array,
    arrays: slice = slice(None),
) -> list[Any]:
    """Return the copies of some arrays of a block into a half."""
    index, semaphore = refs.tables.first_s[0] + slot, refs.semaphores.weights_in.at[half]
    part = pl.ds(pl.multiple_of(block * sizes.block, sizes.block), sizes.block)
    # Of gate and up, and of their scales, a block has columns, of down rows; the scales of down are whole.
    columns, rows, whole = (index, slice(None), part), (index, part), (index,)
    cuts = (columns, columns, rows, columns, columns, whole) if sizes.is_streamed else (whole,) * 6
    triples = list(zip(refs.operands.weights_X, refs.weights_H, cuts, strict=False))[arrays]
    return [pltpu.make_async_copy(flat.at[cut], held.at[half], semaphore) for flat, held, cut in triples]


def _first_copies(refs: Refs, sizes: DispatchSizes, arrays: slice) -> list[Any]:
    """Return the copies of some arrays of the first block of slot 0."""
    return weight_copies(refs, sizes, jnp.int32(0), jnp.int32(0), half=jnp.int32(0), arrays=arrays)
