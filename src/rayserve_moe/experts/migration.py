"""Expert weights from slot to slot while steps go on: few at a time into a staging area, then into place at once.

    slots of a layer --fetch--> staging --swap--> slots of the layer, together with its maps

A fetch reads slots of any rank in place, and writes the staging area alone: steps between it and the swap
compute with the old placement. The swap changes weights and maps of one layer in one program, so that every
step finds both old or both new. Numbers are arguments: the same two programs run every possible move.
"""

# L layers   S local slots   X = L * S   P slots of all ranks = R * S   R ranks   B slots fetched per rank and call
# E experts   N = R * B

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.ragged_exchange import RaggedSlices, ragged_all_to_all
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import DATA, TENSOR

EXPERT_AXES = (DATA, TENSOR)


SlotArrays = dict[str, jax.Array]
"""All arrays of expert slots by name, weights and biases: flat, [X, ...], or staged, [S, ...]."""


class SwappedLayer(NamedTuple):
    """The rows of a layer's new maps, and the slots that take their staged weights; layer -1: none."""

    layer: jax.Array
    is_moved_P: jax.Array
    rows: PlacementArrays


@jax.named_scope("expert_fetch")
def fetch_slots(
    weights: SlotArrays,
    staging: SlotArrays,
    *,
    layer: jax.Array,
    sources_RB: jax.Array,
    places_RB: jax.Array,
    config: ExpertConfig,
) -> SlotArrays:
    """Copy slots of all ranks into the staging area, [S, ...]; `weights` are flat, [X, ...].

    Rank r puts slot `sources_RB[r, b]` of the layer at place `places_RB[r, b]` of its staging. Slots count over all
    ranks, places over the local slots of a layer; a source of -1 is none. Call it inside a sharded function over the
    mesh, with the same numbers on every rank.
    """
    slices, most, num_slices = _slices(sources_RB, layer, config), sources_RB.shape[1], config.plan.num_slices
    packs = num_slices > 1 or platform_of(config.plan.mesh) == "cpu"
    exchange = partial(
        ragged_all_to_all, axis_name=EXPERT_AXES, num_slices=num_slices, rows_sent=most if packs else None
    )
    # Received rows have buffers of their own: a collective that wrote into an argument would have all of it copied.
    arrived = {
        name: exchange(held, jax.lax.empty((most, *held.shape[1:]), held.dtype), slices)
        for name, held in weights.items()
    }
    me = jax.lax.axis_index(EXPERT_AXES)
    is_any_B = (sources_RB[me] >= 0) & (layer >= 0)
    return _write_rows(staging, arrived, rows_N=jnp.arange(most), places_N=places_RB[me], is_any_N=is_any_B)


@jax.named_scope("expert_swap")
def swap_layer(
    weights: SlotArrays,
    maps: PlacementArrays,
    *,
    staging: SlotArrays,
    swapped: SwappedLayer,
    config: ExpertConfig,
) -> tuple[SlotArrays, PlacementArrays]:
    """Write staged weights into the slots of a layer, together with its maps. Call it like `fetch_slots`."""
    num_slots, me = config.num_local_slots, jax.lax.axis_index(EXPERT_AXES)
    layer = jnp.maximum(swapped.layer, 0)
    is_moved_S = jax.lax.dynamic_slice_in_dim(swapped.is_moved_P, me * num_slots, num_slots) > 0
    slots_S = jnp.arange(num_slots)
    weights = _write_rows(
        weights,
        staging,
        rows_N=slots_S,
        places_N=layer * num_slots + slots_S,
        is_any_N=is_moved_S & (swapped.layer >= 0),
    )

    def replace_row(held: jax.Array, row: jax.Array) -> jax.Array:
        return held.at[layer].set(jnp.where(swapped.layer >= 0, row, held[layer]))

    return weights, jax.tree.map(replace_row, maps, swapped.rows)


def _write_rows(
    into: SlotArrays, rows: SlotArrays, *, rows_N: jax.Array, places_N: jax.Array, is_any_N: jax.Array
) -> SlotArrays:
    """Write row `rows_N[i]` to place `places_N[i]` if `is_any_N`, in sequence and in place."""
    (chosen_N,) = jnp.nonzero(is_any_N, size=len(is_any_N), fill_value=0)

    def write(i: jax.Array, into: SlotArrays) -> SlotArrays:
        row, place = rows_N[chosen_N[i]], places_N[chosen_N[i]]

        def take(held: jax.Array, taken: jax.Array) -> jax.Array:
            one = jax.lax.dynamic_slice_in_dim(taken, row, 1)
            return jax.lax.dynamic_update_slice_in_dim(held, one, place, axis=0)

        return {name: take(held, rows[name]) for name, held in into.items()}

    return jax.lax.fori_loop(0, jnp.sum(is_any_N, dtype=jnp.int32), write, into)


def _slices(sources_RB: jax.Array, layer: jax.Array, config: ExpertConfig) -> RaggedSlices:
    """Return the fetch as an exchange of single rows, B from each rank to each rank, most of them empty.

    Entry b from anyone to rank r is the b-th slot that r gets, and arrives as row b.
    """
    num_slots, me = config.num_local_slots, jax.lax.axis_index(EXPERT_AXES)
    is_any_RB = (sources_RB >= 0) & (layer >= 0)
    sender_RB = jnp.where(is_any_RB, jax.lax.div(sources_RB, num_slots), -1)
    is_sent_RB = sender_RB == me
    at_sender_RB = layer * num_slots + jax.lax.rem(sources_RB, num_slots)
    is_received_RB = sender_RB[me] == jnp.arange(config.plan.num_expert_ranks)[:, None]
    rows_RB = jnp.broadcast_to(jnp.arange(sources_RB.shape[1], dtype=jnp.int32), sources_RB.shape)
    return RaggedSlices(
        input_offsets_R=jnp.where(is_sent_RB, at_sender_RB, 0).reshape(-1),
        send_sizes_R=is_sent_RB.astype(jnp.int32).reshape(-1),
        output_offsets_R=jnp.where(is_sent_RB, rows_RB, 0).reshape(-1),
        recv_sizes_R=is_received_RB.astype(jnp.int32).reshape(-1),
    )
