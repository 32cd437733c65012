"""Slots with limited room in a MoE layer: which tokens compete, which replicas are near, and what came of it.

All tokens of all data ranks compete in the order of the ranks, so every device decides for all of them and keeps what
is its own (scope `global`); or every data rank hands out a share of each slot's room to its own tokens (`data_rank`).
"""

# T tokens of a data rank   W tokens that compete   E experts   N expert slots of all ranks   K experts per token
# D devices whose tokens compete   R devices

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.experts.balanced_acceptance import (
    NOT_ELIGIBLE,
    SlotOrder,
    SlotPicks,
    sortable,
    take_best_open,
    take_one,
)
from rayserve_moe.experts.balanced_selection import capacity_of, weights_of
from rayserve_moe.experts.routing import ForcedPicks, best_of_scores
from rayserve_moe.experts.rule import ExpertRule
from rayserve_moe.experts.slot_mapping import WHOLE, PlacementArrays, place_within_expert
from rayserve_moe.parallel.sharding import DATA

OWN_RANK, OWN_HOST, ELSEWHERE = range(3)


class Room(NamedTuple):
    """What all layers of a step share: which of the tokens that compete are no padding, and the room of a slot."""

    valid_W: jax.Array
    capacity: jax.Array


class LimitedPicks(NamedTuple):
    """Slots over all ranks, logical experts, and weights, [T, K]; -1, -1 and 0 where a pick came to nothing.

    `tally_4` int32 counts the picks wanted, those that are among the token's own best, those that got a slot, and
    those on the rank that got most. The tallies of all data ranks add up.
    """

    slots_TK: jax.Array
    ids_TK: jax.Array
    gates_TK: jax.Array
    tally_4: jax.Array


def room_of(valid_T: jax.Array, capacity_factor: jax.Array, *, rule: ExpertRule) -> Room:
    """The room there is in a step; all ranks take part in finding it."""
    valid_W = _compete(valid_T, rule)
    return Room(valid_W, capacity_of(capacity_factor, valid_W, k=rule.top_k, num_slots=rule.num_slots))


def pick_with_room(  # noqa: PLR0913 (what differs from call to call is by keyword)
    scores_TE: jax.Array,
    valid_T: jax.Array,
    *,
    maps: PlacementArrays | None,
    layer: jax.Array,
    room: Room,
    rule: ExpertRule,
    forced: ForcedPicks | None = None,
) -> LimitedPicks:
    """Pick experts by `scores_TE` and slots by their room; `forced` is for `replicas_only`."""
    valid_W, capacity = room
    order = order_of_placement(maps, layer, num_tokens=len(valid_T), rule=rule)
    if rule.selection == "balanced":
        scores_WE = _compete(scores_TE, rule)
        everyones = take_best_open(sortable(scores_WE, valid_W), order, k=rule.top_k, capacity=capacity)
        mine = SlotPicks(*(_my_part(array_KW, rule) for array_KW in everyones[:3]), everyones.taken_N)
        gates_TK = weights_of(mine, scores_TE, renormalize=rule.renormalize)
        tally_4 = _tally(mine, valid_T, everyones.taken_N, rule)
        return LimitedPicks(mine.slots_KB.T, mine.experts_KB.T, gates_TK, tally_4)
    ids_TK, gates_TK = best_of_scores(scores_TE, top_k=rule.top_k, renormalize=rule.renormalize, forced=forced)
    slots_KW, taken_N = spread_over_replicas(_compete(ids_TK, rule).T, valid_W, order, capacity=capacity)
    slots_KT, is_valid_KT = _my_part(slots_KW, rule), jnp.broadcast_to(valid_T, ids_TK.T.shape)
    mine = SlotPicks(slots_KT, ids_TK.T, is_valid_KT, taken_N)
    return LimitedPicks(slots_KT.T, ids_TK, gates_TK, _tally(mine, valid_T, taken_N, rule))


def spread_over_replicas(
    ids_KW: jax.Array, valid_W: jax.Array, order: SlotOrder, *, capacity: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A slot of its expert for every pick, int32 [K, W] (-1: padding), and tokens per slot [N].

    The first slot with room; where an expert has none left, further tokens are dealt to its slots in turn.
    """
    num_slots = len(order.expert_N)

    def take(taken_N: jax.Array, ids_W: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_its_own_NW = (order.expert_N[:, None] == ids_W) & valid_W
        likes_NW = jnp.where(is_its_own_NW, 0, NOT_ELIGIBLE)
        slots_W, taken_N = take_one(likes_NW, order, taken_N=taken_N, capacity=capacity)
        return taken_N, slots_W

    _, slots_KW = jax.lax.scan(take, jnp.zeros(num_slots, jnp.int32), ids_KW)
    is_left_KW = (slots_KW == num_slots) & valid_W
    index_KW, _ = place_within_expert(jnp.where(is_left_KW, ids_KW, num_slots), num_slots)
    by_expert_N = jnp.argsort(order.expert_N, stable=True)
    counts_N = jnp.sum(order.expert_N[:, None] == jnp.arange(num_slots), axis=0, dtype=jnp.int32)
    first_N = jnp.cumsum(counts_N) - counts_N
    dealt_KW = by_expert_N[first_N[ids_KW] + jax.lax.rem(index_KW, jnp.maximum(counts_N[ids_KW], 1))]
    slots_KW = jnp.where(is_left_KW, dealt_KW.astype(jnp.int32), slots_KW)
    taken_N = jnp.zeros(num_slots, jnp.int32).at[slots_KW.reshape(-1)].add(1, mode="drop")
    return jnp.where(slots_KW < num_slots, slots_KW, -1), taken_N


def order_of_placement(
    maps: PlacementArrays | None, layer: jax.Array, *, num_tokens: int, rule: ExpertRule
) -> SlotOrder:
    """Whose slots are whose, and how near: on the rank that dispatches a token, on its host, elsewhere.

    `num_tokens` are those of a data rank; a rank dispatches its part of them (`take_part`).
    """
    num_slots = rule.num_slots
    slots_N = jnp.arange(num_slots, dtype=jnp.int32)
    expert_N = slots_N
    if maps is not None:
        experts = jnp.asarray(maps.bounds_LP)[layer] // WHOLE
        expert_N = jnp.zeros(num_slots, jnp.int32).at[jnp.asarray(maps.slots_LP)[layer]].set(experts)
    if rule.num_redundant == 0 or rule.plan.num_expert_ranks == 1:
        return SlotOrder(expert_N, (expert_N * num_slots + slots_N)[:, None])
    distance_ND = jnp.asarray(distances(rule))
    if rule.capacity_scope == "data_rank":
        first = rule.plan.data_rank() * rule.plan.tensor_size
        distance_ND = jax.lax.dynamic_slice_in_dim(distance_ND, first, rule.plan.tensor_size, axis=1)
    place_ND = (expert_N[:, None] * (ELSEWHERE + 1) + distance_ND) * num_slots + slots_N[:, None]
    part = -(-num_tokens // rule.plan.tensor_size)
    by_rank = jnp.repeat(place_ND, part, axis=1).reshape(num_slots, -1, part * rule.plan.tensor_size)
    return SlotOrder(expert_N, by_rank[:, :, :num_tokens].reshape(num_slots, -1))


def distances(rule: ExpertRule) -> np.ndarray:
    """How far each slot lies from each rank, int32 [N, R]: OWN_RANK, OWN_HOST or ELSEWHERE."""
    ranks = np.arange(rule.plan.num_expert_ranks)
    hosts = np.array([device.process_index for device in rule.plan.mesh.devices.flat])
    apart = np.where(hosts[:, None] == hosts, OWN_HOST, ELSEWHERE)
    apart = np.where(ranks[:, None] == ranks, OWN_RANK, apart)
    return np.repeat(apart, rule.num_local_slots, axis=0).astype(np.int32)


def _compete(local: jax.Array, rule: ExpertRule) -> jax.Array:
    """Join what all tokens that compete with this rank's have of an array, tokens first."""
    return rule.plan.gather_data_ranks(local, dim=0) if rule.capacity_scope == "global" else local


def _my_part(array_KW: jax.Array, rule: ExpertRule) -> jax.Array:
    if rule.capacity_scope != "global" or rule.plan.data_size == 1:
        return array_KW
    num_tokens = array_KW.shape[1] // rule.plan.data_size
    return jax.lax.dynamic_slice_in_dim(array_KW, rule.plan.data_rank() * num_tokens, num_tokens, axis=1)


def _tally(mine: SlotPicks, valid_T: jax.Array, taken_N: jax.Array, rule: ExpertRule) -> jax.Array:
    """See `LimitedPicks`; the hottest rank is counted by the first data rank alone."""
    if rule.capacity_scope != "global" and rule.plan.data_size > 1:
        taken_N = jax.lax.psum(taken_N, DATA)
    hottest = jnp.max(jnp.sum(taken_N.reshape(rule.plan.num_expert_ranks, -1), axis=1))
    num_wanted = rule.top_k * jnp.sum(valid_T, dtype=jnp.int32)
    num_filled = jnp.sum(mine.slots_KB >= 0, dtype=jnp.int32)
    is_first = rule.plan.data_rank() == 0
    num_kept = jnp.sum(mine.is_kept_KB, dtype=jnp.int32)
    return jnp.stack([num_wanted, num_kept, num_filled, jnp.where(is_first, hottest, 0).astype(jnp.int32)])
