"""Rows on their way between ranks, in the kernel `pushed_experts`: who is where, copies, and the words of a row.

A row is D bfloat16 numbers as [Q, LANES] words, each with a number of the lower half of the row in its lower bits and
one of the upper half above. So a row lies together in memory, and may be copied alone.
"""

# D model width   N rows   Q words of a row / LANES

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.tpu.pushed_sizes import PushSizes, Refs

UPPER = 0xFFFF0000
Part = tuple[Any, Any, jax.Array]
"""Rows, where they go, and how many they are."""


def my_rank(sizes: PushSizes) -> jax.Array:
    """This device's rank."""
    rank = jnp.int32(0)
    for name, size in sizes.axes:
        rank = rank * size + jax.lax.axis_index(name)
    return rank


def device_of(rank: jax.Array, sizes: PushSizes) -> dict[str | tuple[str, ...], int | jax.Array]:
    """Where a rank lies on the mesh."""
    place: dict[str | tuple[str, ...], int | jax.Array] = {}
    for name, size in reversed(sizes.axes):
        place[name] = jax.lax.rem(rank, size)
        rank = jax.lax.div(rank, size)
    return place


def rows_at(ref: Any, first: jax.Array, number: jax.Array | int, sizes: PushSizes) -> Any:
    """The part of an array of words that `number` rows from row `first` on have."""
    words = sizes.row_words
    return ref.at[pl.ds(pl.multiple_of(first * words, words), number * words)]


def wait_for(ref: Any, number: jax.Array, semaphore: Any, sizes: PushSizes) -> None:
    """Wait until as much as `number` rows has been copied; `ref` is of the rows' form."""

    @pl.when(number > 0)
    def _() -> None:
        rows = rows_at(ref, jnp.int32(0), number, sizes)
        pltpu.make_async_copy(rows, rows, semaphore).wait()


def meet(sizes: PushSizes, me: jax.Array) -> None:
    """Wait until this core is here on all ranks, so that what is sent to them from now on arrives in this call."""
    barrier = pltpu.get_barrier_semaphore()

    def signal(k: jax.Array, _: None) -> None:
        device = device_of(jax.lax.rem(me + k, sizes.num_ranks), sizes)
        core = pl.program_id(0)
        pl.semaphore_signal(barrier, 1, device_id=device, device_id_type=pl.DeviceIdType.MESH, core_index=core)

    jax.lax.fori_loop(1, sizes.num_ranks, signal, None)
    pl.semaphore_wait(barrier, sizes.num_ranks - 1)


def push_slot(refs: Refs, sizes: PushSizes, me: jax.Array, slot: jax.Array, pushed: jax.Array) -> jax.Array:
    """Push the rows for one slot of every rank; counts on how many rows left this device.

    There is nothing to push for a slot beyond the last one.
    """
    is_slot, slot = slot < sizes.num_slots, jnp.minimum(slot, sizes.num_slots - 1)

    def part_for(rank: jax.Array) -> Part:
        lane = rank * sizes.num_slots + slot
        number = jnp.where(is_slot, refs.table_s[me, lane], 0)
        rows = rows_at(refs.sent, refs.table_s[2 * sizes.num_ranks + me, lane], number, sizes)
        return rows, rows_at(refs.here, refs.table_s[sizes.num_ranks + me, lane], number, sizes), number

    return pushed + _copy_to_all(part_for, (refs.moved.at[0], refs.arrived_S.at[slot]), sizes, me)


def return_slot(refs: Refs, sizes: PushSizes, me: jax.Array, slot: jax.Array, returned: jax.Array) -> jax.Array:
    """Push a slot's results to where their rows came from; counts on how many rows left this device."""
    lane = me * sizes.num_slots + slot

    def part_for(rank: jax.Array) -> Part:
        number = refs.table_s[rank, lane]
        rows = rows_at(refs.here, refs.table_s[sizes.num_ranks + rank, lane], number, sizes)
        return rows, rows_at(refs.home, refs.table_s[2 * sizes.num_ranks + rank, lane], number, sizes), number

    return returned + _copy_to_all(part_for, (refs.moved.at[1], refs.moved.at[2]), sizes, me)


def _copy_to_all(
    part_for: Callable[[jax.Array], Part], semaphores: tuple[Any, Any], sizes: PushSizes, me: jax.Array
) -> jax.Array:
    """Copy each rank's part to it, the next one's first, this one's own last; returns how many rows left this device.

    The semaphores say that rows have left this device, and that they have arrived.
    """
    left, arrived = semaphores

    def send(k: jax.Array, number_left: jax.Array) -> jax.Array:
        rank = jnp.where(me + k < sizes.num_ranks, me + k, me + k - sizes.num_ranks)
        rows, to, number = part_for(rank)

        @pl.when(number > 0)
        def _() -> None:
            device = device_of(rank, sizes)
            pltpu.make_async_remote_copy(
                rows, to, left, arrived, device_id=device, device_id_type=pl.DeviceIdType.MESH
            ).start()

        return number_left + number

    number_left = jax.lax.fori_loop(1, sizes.num_ranks, send, jnp.int32(0))
    rows, to, number = part_for(me)

    @pl.when(number > 0)
    def _() -> None:
        pltpu.make_async_copy(rows, to, arrived).start()

    return number_left


def as_words(rows: jax.Array) -> jax.Array:
    """Rows of float32 that are bfloat16 numbers [N, D] as words [N, D / 2]."""
    bits, half = pltpu.bitcast(rows, jnp.uint32), rows.shape[1] // 2
    return (bits[:, :half] >> 16) | (bits[:, half:] & jnp.uint32(UPPER))


def halves(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers in the lower and in the upper bits of words, in float32."""
    return pltpu.bitcast(words << 16, jnp.float32), pltpu.bitcast(words & jnp.uint32(UPPER), jnp.float32)
