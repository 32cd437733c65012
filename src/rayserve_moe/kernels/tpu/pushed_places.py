"""Where assignments go in the kernel `pushed_experts`: by counting, as values of the kernel's vector unit.

An assignment has a place among those of its device, slot after slot. At the device of its slot the rows of all
senders lie together, slot after slot too, each slot's beginning at a multiple of the rows of a tile:

    sender's rows    [ slot 0 | slot 1 | ... ]                                  of all devices
    receiver's rows  [ slot 0: from rank 0, from rank 1, ... | up to a tile | slot 1 ... ]

All of that follows from how many rows each rank has for each slot, so ranks tell each other these counts alone.
"""

# T tokens, up to whole tiles   K experts per token   P slots of all ranks, up to whole lanes   R ranks   S local slots

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.tpu.pushed_sizes import LANES, PushSizes


def slots_of_core(slots_TK: jax.Array, core: jax.Array, sizes: PushSizes) -> jax.Array:
    """The slots of all ranks that a core has to do with, counted without those of other cores; -1 for all others."""
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
    """Assignments of each slot: float32 [1, P], whole numbers. A slot of P or beyond, or below 0, is none."""
    total_P = jnp.zeros((1, num_lanes), jnp.float32)
    for k in range(slots_TK.shape[1]):
        total_P += jnp.sum(_is_slot(slots_TK, k, num_lanes), axis=0, keepdims=True)
    return total_P


def places_of(slots_TK: jax.Array, counts_P: jax.Array, *, nowhere: int) -> jax.Array:
    """Place of each assignment among those of this device: int32 [T, LANES], of which K columns are used.

    Those of a slot are in the order of their columns, then tokens. What has no slot has the place `nowhere`.
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


def table_rows(rank_counts: list[jax.Array], *, num_local: int, tile_rows: int) -> list[jax.Array]:
    """What the kernel's scalar unit looks up by slot, int32 [1, P] each, from each rank's counts (float32 [1, P]).

    For every rank: how many rows it has for a slot; then, where they begin at the slot's device; then, where they begin
    at the rank. At last the rows of all ranks for a slot, and where they begin.
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
    """Of each lane the sum of the lanes before it within its group of `group`: exact for sums below 2**24."""
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
