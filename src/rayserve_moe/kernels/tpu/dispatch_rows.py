"""Rows of the kernel `low_latency_dispatch`: their places by counting, and their way between ranks.

A row is D bfloat16 numbers as [Q, LANES] words, each with a number of the lower half of the row in the lower bits
and a number of the upper half above. So a row is contiguous in memory and may be copied alone.

An assignment has a place among the assignments of its device, slot after slot. At the device of its slot the rows of
all senders are adjacent, slot after slot too, each slot's beginning at a multiple of the rows of a tile:

    sender's rows    [ slot 0 | slot 1 | ... ]                                  of all devices
    receiver's rows  [ slot 0: from rank 0, from rank 1, ... | up to a tile | slot 1 ... ]

The number of rows of each rank for each slot determines all of that, so ranks share these counts only. The kernel's
vector unit computes them.
"""

# D model width   N rows   Q words of a row / LANES   T tokens, up to whole tiles   K experts per token
# P slots of all ranks, up to whole lanes   R ranks   S local slots

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.tpu.dispatch_sizes import LANES, DispatchSizes, Refs

UPPER = 0xFFFF0000
Part = tuple[Any, Any, jax.Array]
"""Rows, their target, and their number."""


def my_rank(sizes: DispatchSizes) -> jax.Array:
    """Return this device's rank."""
    rank = jnp.int32(0)
    for name, size in sizes.axes:
        rank = rank * size + jax.lax.axis_index(name)
    return rank


def device_of(rank: jax.Array, sizes: DispatchSizes) -> dict[str | tuple[str, ...], int | jax.Array]:
    """Return the mesh coordinates of a rank."""
    place: dict[str | tuple[str, ...], int | jax.Array] = {}
    for name, size in reversed(sizes.axes):
        place[name] = jax.lax.rem(rank, size)
        rank = jax.lax.div(rank, size)
    return place


def rows_at(ref: Any, first: jax.Array, number: jax.Array | int, sizes: DispatchSizes) -> Any:
    """Return the words of `number` rows from row `first` on."""
    words = sizes.row_words
    return ref.at[pl.ds(pl.multiple_of(first * words, words), number * words)]


def wait_for(ref: Any, number: jax.Array, semaphore: Any, sizes: DispatchSizes) -> None:
    """Wait until as much as `number` rows has been copied; `ref` is of the rows' form."""

    @pl.when(number > 0)
    def _() -> None:
        rows = rows_at(ref, jnp.int32(0), number, sizes)
        pltpu.make_async_copy(rows, rows, semaphore).wait()


def arrive(sizes: DispatchSizes, me: jax.Array) -> None:
    """Signal all other ranks that this core has entered the call, so that they may copy to it."""
    barrier = pltpu.get_barrier_semaphore()

    def signal(k: jax.Array, _: None) -> None:
        device = device_of(jax.lax.rem(me + k, sizes.num_ranks), sizes)
        core = pl.program_id(0)
        pl.semaphore_signal(barrier, 1, device_id=device, device_id_type=pl.DeviceIdType.MESH, core_index=core)

    jax.lax.fori_loop(1, sizes.num_ranks, signal, None)


def meet(sizes: DispatchSizes) -> None:
    """Wait until this core has entered the call on all other ranks (`arrive`)."""
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), sizes.num_ranks - 1)


def send_slot(refs: Refs, sizes: DispatchSizes, me: jax.Array, slot: jax.Array, num_sent: jax.Array) -> jax.Array:
    """Send the rows for a slot of every rank; return the number of rows sent so far.

    A slot beyond the last one has no rows.
    """
    is_slot, slot = slot < sizes.num_slots, jnp.minimum(slot, sizes.num_slots - 1)
    table_s = refs.tables.table_s

    def part_for(rank: jax.Array) -> Part:
        lane = rank * sizes.num_slots + slot
        number = jnp.where(is_slot, table_s[me, lane], 0)
        rows = rows_at(refs.rows.sent, table_s[2 * sizes.num_ranks + me, lane], number, sizes)
        return rows, rows_at(refs.rows.here, table_s[sizes.num_ranks + me, lane], number, sizes), number

    return num_sent + _copy_to_all(
        part_for, (refs.semaphores.moved.at[0], refs.semaphores.arrived_S.at[slot]), sizes, me
    )


def return_slot(refs: Refs, sizes: DispatchSizes, me: jax.Array, slot: jax.Array, returned: jax.Array) -> jax.Array:
    """Send a slot's results back to the ranks of their rows; return the number of rows sent so far."""
    lane, table_s = me * sizes.num_slots + slot, refs.tables.table_s

    def part_for(rank: jax.Array) -> Part:
        number = table_s[rank, lane]
        rows = rows_at(refs.rows.here, table_s[sizes.num_ranks + rank, lane], number, sizes)
        return rows, rows_at(refs.rows.home, table_s[2 * sizes.num_ranks + rank, lane], number, sizes), number

    return returned + _copy_to_all(part_for, (refs.semaphores.moved.at[1], refs.semaphores.moved.at[2]), sizes, me)


def _copy_to_all(
    part_for: Callable[[jax.Array], Part], semaphores: tuple[Any, Any], sizes: DispatchSizes, me: jax.Array
) -> jax.Array:
    """Copy each rank's part to it, beginning with the next rank; return the number of rows that left this device.

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
    """Return rows of float32 that are bfloat16 numbers [N, D] as words [N, D / 2]."""
    bits, half = pltpu.bitcast(rows, jnp.uint32), rows.shape[1] // 2
    return (bits[:, :half] >> 16) | (bits[:, half:] & jnp.uint32(UPPER))


def rounded(numbers: jax.Array) -> jax.Array:
    """Return float32 numbers rounded to bfloat16, in float32."""
    return numbers.astype(jnp.bfloat16).astype(jnp.float32)


def halves(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the numbers in the lower and in the upper bits of words, in float32."""
    return pltpu.bitcast(words << 16, jnp.float32), pltpu.bitcast(words & jnp.uint32(UPPER), jnp.float32)


def slots_of_core(slots_TK: jax.Array, core: jax.Array, sizes: DispatchSizes) -> jax.Array:
    """Return a core's slots of all ranks, numbered among the core's slots; -1 for slots of other cores."""
    slots_TK = jnp.where(slots_TK < sizes.num_ranks * sizes.num_slots, slots_TK, -1)
    if sizes.num_cores == 1:
        return slots_TK
    num_slots = sizes.of_core.num_slots
    # Whole numbers so small are exact, and so is the floor of what is between them.
    rank_TK = jnp.floor((slots_TK.astype(jnp.float32) + 0.5) * (1.0 / sizes.num_slots)).astype(jnp.int32)
    local_TK = slots_TK - rank_TK * sizes.num_slots - core * num_slots
    is_own_TK = (slots_TK >= 0) & (local_TK >= 0) & (local_TK < num_slots)
    return jnp.where(is_own_TK, rank_TK * num_slots + local_TK, -1)


def count_slots(slots_TK: jax.Array, num_lanes: int) -> jax.Array:
    """Count the assignments of each slot: float32 [1, P], whole numbers. A slot of P or beyond, or below 0, is none."""
    total_P = jnp.zeros((1, num_lanes), jnp.float32)
    for k in range(slots_TK.shape[1]):
        total_P += jnp.sum(_is_slot(slots_TK, k, num_lanes), axis=0, keepdims=True)
    return total_P


def places_of(slots_TK: jax.Array, counts_P: jax.Array, *, nowhere: int) -> jax.Array:
    """Return the place of each assignment on this device: int32 [T, LANES], with K columns in use.

    Assignments of a slot are in the order of columns, then tokens. Without a slot the place is `nowhere`.
    """
    (num_tokens, top_k), num_lanes = slots_TK.shape, counts_P.shape[1]
    earlier_TT = _iota((num_tokens, num_tokens), 0) > _iota((num_tokens, num_tokens), 1)
    next_P = sums_before(counts_P, num_lanes)
    places_TL = jnp.zeros((num_tokens, LANES), jnp.float32)
    for k in range(top_k):
        is_slot_TP = _is_slot(slots_TK, k, num_lanes)
        # Zeros and ones are exact in bfloat16, and they are added up in float32.
        before_TP = jnp.dot(
            earlier_TT.astype(jnp.bfloat16), is_slot_TP.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        place_T1 = jnp.sum(is_slot_TP * (before_TP + next_P), axis=1, keepdims=True)
        is_any_T1 = jnp.sum(is_slot_TP, axis=1, keepdims=True) > 0
        place_T1 = jnp.where(is_any_T1, place_T1, float(nowhere))
        places_TL = jnp.where(_iota((num_tokens, LANES), 1) == k, place_T1, places_TL)
        next_P += jnp.sum(is_slot_TP, axis=0, keepdims=True)
    return places_TL.astype(jnp.int32)


def in_slot_order(slots_TK: jax.Array, places_TL: jax.Array, *, num_local: int) -> jax.Array:
    """Return the places of a token's assignments in the order of slots: int32 [T, LANES], with 3 * K columns in use.

    The next K columns have the number of each assignment, and the last K columns 1 if it is the first one of a rank.
    """
    top_k, column_TL = slots_TK.shape[1], _iota((len(places_TL), LANES), 1)
    slots = [slots_TK[:, k : k + 1].astype(jnp.float32) for k in range(top_k)]
    # Whole numbers so small are exact, and so is the floor of what is between them.
    ranks = [jnp.floor((slot_T1 + 0.5) * (1.0 / num_local)) for slot_T1 in slots]
    ordered_TL = jnp.zeros_like(places_TL)
    for k, (slot_T1, rank_T1) in enumerate(zip(slots, ranks, strict=True)):
        order_T1, is_first_T1 = jnp.zeros_like(slot_T1), jnp.ones_like(slot_T1)
        for other in range(top_k):
            is_ahead_T1 = slots[other] <= slot_T1 if other < k else slots[other] < slot_T1
            order_T1 += is_ahead_T1.astype(jnp.float32)
            is_first_T1 = jnp.where(is_ahead_T1 & (ranks[other] == rank_T1), 0.0, is_first_T1)
        order_T1 = order_T1.astype(jnp.int32)
        place_T1, is_first_T1 = places_TL[:, k : k + 1], is_first_T1.astype(jnp.int32)
        for part, value_T1 in enumerate((place_T1, jnp.full_like(place_T1, k), is_first_T1)):
            ordered_TL = jnp.where(column_TL == order_T1 + part * top_k, value_T1, ordered_TL)
    return ordered_TL


def table_rows(rank_counts: list[jax.Array], *, num_local: int, tile_rows: int) -> list[jax.Array]:
    """Return the rows of the scalar unit's table by slot, int32 [1, P] each, from each rank's counts (float32 [1, P]).

    For every rank: its number of rows for a slot; then their first place at the slot's device; then their first place
    at the rank. The last two rows are the number of all ranks' rows for a slot, and their first place.
    """
    num_lanes = rank_counts[0].shape[1]
    total_P = sum(rank_counts[1:], rank_counts[0])
    in_tiles_P = jnp.floor((total_P + float(tile_rows - 1)) * (1.0 / tile_rows)) * float(tile_rows)
    begin_P = sums_before(in_tiles_P, num_local)
    at_receiver, seen_P = [], begin_P
    for counts_P in rank_counts:
        at_receiver.append(seen_P)
        seen_P += counts_P
    at_sender = [sums_before(counts_P, num_lanes) for counts_P in rank_counts]
    rows = [*rank_counts, *at_receiver, *at_sender, total_P, begin_P]
    return [row_P.astype(jnp.int32) for row_P in rows]


def sums_before(values_P: jax.Array, group: int) -> jax.Array:
    """Return for each lane the sum of the lanes before it in its group of `group`: exact for sums below 2**24."""
    size = values_P.shape[1]
    row_PP, column_PP = _iota((size, size), 0), _iota((size, size), 1)
    first_PP = column_PP - jax.lax.rem(column_PP, group)
    is_before_PP = (row_PP < column_PP) & (row_PP >= first_PP)
    values = jnp.broadcast_to(values_P, (8, size))
    sums = jnp.dot(
        values,
        is_before_PP.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return sums[:1]


def _is_slot(slots_TK: jax.Array, k: int, num_lanes: int) -> jax.Array:
    return (slots_TK[:, k : k + 1] == _iota((slots_TK.shape[0], num_lanes), 1)).astype(jnp.float32)


def _iota(shape: tuple[int, int], dim: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, dim)
