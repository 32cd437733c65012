"""The order of assignments by slot and the tiles of each slot in one Triton kernel, for the assignments of few tokens.

XLA makes seven kernels of them. More assignments than a program compares are ordered by XLA.
"""

# T tokens   K slots of a token   P assignments = T * K   S local slots   I tiles

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rayserve_moe.kernels.gpu.blocks import cdiv, power_of_two
from rayserve_moe.kernels.slot_order import order_by_slot

MAX_ASSIGNMENTS, MAX_SLOTS = 1024, 256
"""Maximum numbers that the kernel compares with each other."""
CHUNK = 32
"""Assignments, or tiles, that are compared at once."""


class Tiles(NamedTuple):
    """Rows in tiles: the slot of each in the flat weights, its first row, and one past its last row, int32 [I]."""

    slot_I: jax.Array
    first_I: jax.Array
    end_I: jax.Array


class TileOrder(NamedTuple):
    """The token of each row and the row of each assignment, int32 [P], as `slot_order.order_by_slot`, and the tiles."""

    token_P: jax.Array
    row_P: jax.Array
    tiles: Tiles


def order_tiles(
    slots_TK: jax.Array, num_slots: int, height: int, first_slot: jax.Array | int, *, interpret: bool = False
) -> TileOrder:
    """Order the assignments and cut them into tiles of `height` rows; `interpret` runs it without a GPU.

    Slots of `num_slots` or beyond come last, and have no tiles. As many tiles are returned as there can be; the others
    are empty.
    """
    num_rows = slots_TK.size
    if num_rows > MAX_ASSIGNMENTS or num_slots > MAX_SLOTS:
        slots_P = jnp.minimum(slots_TK.reshape(-1), num_slots)
        counts_S = jnp.sum(slots_P[:, None] == jnp.arange(num_slots), axis=0, dtype=jnp.int32)
        token_P, row_P = order_by_slot(slots_TK, num_slots)
        return TileOrder(token_P, row_P, tiles_of(counts_S, num_rows, height, first_slot))
    of_row = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    of_tile = jax.ShapeDtypeStruct((max_tiles(num_rows, num_slots, height),), jnp.int32)
    token_P, row_P, *tiles = pl.pallas_call(
        partial(_order, num_slots=num_slots, height=height, top_k=slots_TK.shape[1]),
        out_shape=[of_row, of_row, of_tile, of_tile, of_tile],
        grid=(1,),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="gpu_tile_order",
    )(jnp.reshape(jnp.asarray(first_slot, jnp.int32), (1,)), slots_TK.reshape(-1).astype(jnp.int32))
    return TileOrder(token_P, row_P, Tiles(*tiles))


def max_tiles(num_rows: int, num_slots: int, height: int) -> int:
    """Return the maximum number of tiles that rows can take."""
    return num_rows // height + min(num_slots, num_rows)


def tiles_of(counts_S: jax.Array, num_rows: int, height: int, first_slot: jax.Array | int) -> Tiles:
    """Return the tiles of slots with these numbers of rows, by XLA."""
    num_slots = len(counts_S)
    of_slot_S = (counts_S + height - 1) // height
    last_S = jnp.cumsum(of_slot_S)
    begin_S = jnp.cumsum(counts_S) - counts_S
    number_I = jnp.arange(max_tiles(num_rows, num_slots, height), dtype=jnp.int32)
    slot_I = jnp.sum(last_S[None] <= number_I[:, None], axis=1, dtype=jnp.int32)
    is_there_I = slot_I < num_slots
    slot_I = jnp.minimum(slot_I, num_slots - 1)
    first_I = begin_S[slot_I] + (number_I - (last_S - of_slot_S)[slot_I]) * height
    end_I = jnp.minimum(first_I + height, (begin_S + counts_S)[slot_I])
    return Tiles(first_slot + slot_I, jnp.where(is_there_I, first_I, 0), jnp.where(is_there_I, end_I, 0))


def _order(*refs: Any, num_slots: int, height: int, top_k: int) -> None:
    """Compare all assignments, then all tiles with all slots."""
    first_slot, slots, token, row, tile_slot, tile_first, tile_end = refs
    num_rows, num_tiles = slots.shape[0], tile_slot.shape[0]
    # Places beyond the last row, or tile, repeat it.
    numbers_P = jnp.minimum(jnp.arange(power_of_two(num_rows)), num_rows - 1)
    slots_S = jnp.arange(power_of_two(num_slots))

    def own(numbers: jax.Array) -> jax.Array:
        found = plgpu.load(slots.at[numbers], mask=numbers < num_rows, other=num_slots)
        return jnp.minimum(found, num_slots)

    slots_P = own(numbers_P)

    def compare(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        others = i * CHUNK + jnp.arange(CHUNK)
        of_others, is_other = own(others), others < num_rows
        is_before = (of_others[None, :] < slots_P[:, None]) | (
            (of_others[None, :] == slots_P[:, None]) & (others[None, :] < numbers_P[:, None])
        )
        places = jnp.sum((is_before & is_other[None, :]).astype(jnp.int32), axis=1)
        counts = jnp.sum(((of_others[None, :] == slots_S[:, None]) & is_other[None, :]).astype(jnp.int32), axis=1)
        return carry[0] + places, carry[1] + counts

    zeros = jnp.zeros(slots_P.shape, jnp.int32), jnp.zeros(slots_S.shape, jnp.int32)
    row_P, counts_S = jax.lax.fori_loop(0, cdiv(num_rows, CHUNK), compare, zeros)
    plgpu.store(row.at[numbers_P], row_P)
    plgpu.store(token.at[row_P], numbers_P // top_k)
    counts_S = jnp.where(slots_S < num_slots, counts_S, 0)
    of_slot_S = (counts_S + height - 1) // height
    last_S, begin_S = jnp.cumsum(of_slot_S), jnp.cumsum(counts_S) - counts_S

    def place(i: jax.Array, _: None) -> None:
        numbers = jnp.minimum(i * CHUNK + jnp.arange(CHUNK), num_tiles - 1)
        is_past = (last_S[None, :] <= numbers[:, None]) & (slots_S < num_slots)[None, :]
        slot_I = jnp.sum(is_past.astype(jnp.int32), axis=1)
        is_own = slots_S[None, :] == slot_I[:, None]

        def of_slot(values_S: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(is_own, values_S[None, :], 0), axis=1)

        first_I = of_slot(begin_S) + (numbers - of_slot(last_S - of_slot_S)) * height
        end_I = jnp.minimum(first_I + height, of_slot(begin_S + counts_S))
        is_there = slot_I < num_slots
        plgpu.store(tile_slot.at[numbers], first_slot[0] + jnp.minimum(slot_I, num_slots - 1))
        plgpu.store(tile_first.at[numbers], jnp.where(is_there, first_I, 0))
        plgpu.store(tile_end.at[numbers], jnp.where(is_there, end_I, 0))

    jax.lax.fori_loop(0, cdiv(num_tiles, CHUNK), place, None)
