"""Experts under a capacity per slot: the tokens that compete, the near replicas, and the choice beside full slots.

A full slot's tokens go to a replica, or to their next best expert. The latter changes what a model computes, and the
result of a token depends on the other tokens of the step: it is used only if the settings select it.

All tokens of all data ranks compete in the order of the ranks, so every device decides for all of them and keeps its
own (scope `global`); or every data rank assigns a share of each slot's capacity to its own tokens (`data_rank`).
"""

# T tokens of a data rank   W or B tokens that compete   E experts   N expert slots of all ranks
# M slots of an expert at most   K experts per token   D devices whose tokens compete   R devices

from __future__ import annotations

from functools import reduce
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.experts.balanced_acceptance import (
    NO_PLACE,
    NOT_ELIGIBLE,
    SlotAssignments,
    SlotOrder,
    sortable,
    take_best_open,
    take_one,
)
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.routing import ExpertScores, ForcedExperts, select_top_k
from rayserve_moe.experts.slot_mapping import WHOLE, PlacementArrays, place_within_expert
from rayserve_moe.parallel.sharding import DATA

OWN_RANK, OWN_HOST, ELSEWHERE = range(3)


class StepCapacity(NamedTuple):
    """Arrays that all layers of a step share: the competing tokens that are no padding, and the capacity of a slot."""

    valid_W: jax.Array
    capacity: jax.Array


class LimitedAssignments(NamedTuple):
    """Slots over all ranks, logical experts, and weights, [T, K]; -1, -1 and 0 for an assignment that was not filled.

    `tally_4` int32 counts assignments: wanted, among the token's own best, filled, and on the fullest rank. The tallies
    of all data ranks add up.
    """

    slots_TK: jax.Array
    ids_TK: jax.Array
    gates_TK: jax.Array
    tally_4: jax.Array


def step_capacity(valid_T: jax.Array, capacity_factor: jax.Array, *, config: ExpertConfig) -> StepCapacity:
    """Return the capacity of a slot in a step; a collective of all ranks."""
    valid_W = _compete(valid_T, config)
    top_k = config.router.top_k
    return StepCapacity(valid_W, capacity_of(capacity_factor, valid_W, k=top_k, num_slots=config.num_slots))


def assign_slots(  # noqa: PLR0913 (keyword arguments that vary by call)
    scores: ExpertScores,
    valid_T: jax.Array,
    *,
    maps: PlacementArrays | None,
    layer: jax.Array,
    capacity: StepCapacity,
    config: ExpertConfig,
    forced: ForcedExperts | None = None,
) -> LimitedAssignments:
    """Choose experts by their scores and slots by their capacity; `forced` is for `replicas_only`.

    `balanced` ranks experts by the router's biased scores. An expert outside of the groups that a token keeps is not
    eligible for it, even if the kept groups are full. Weights are the unbiased scores of the chosen experts.
    """
    (valid_W, per_slot), router = capacity, config.router
    order = order_of_placement(maps, layer, num_tokens=len(valid_T), config=config)
    if config.selection == "balanced":
        choice_WE = _compete(scores.scores_TE if scores.choice_TE is None else scores.choice_TE, config)
        assigned = take_best_open(sortable(choice_WE, valid_W), order, k=router.top_k, capacity=per_slot)
        mine = SlotAssignments(*(_my_part(array_KW, config) for array_KW in assigned[:3]), assigned.taken_N)
        gates_TK = weights_of(
            mine,
            scores.scores_TE,
            renormalize=router.renormalize,
            scale=router.scale,
            floor=router.renormalize_floor,
        )
        tally_4 = _tally(mine, valid_T, assigned.taken_N, config)
        return LimitedAssignments(mine.slots_KB.T, mine.experts_KB.T, gates_TK, tally_4)
    ids_TK, gates_TK = select_top_k(scores, router=router, forced=forced)
    slots_KW, taken_N = spread_over_replicas(_compete(ids_TK, config).T, valid_W, order, capacity=per_slot)
    slots_KT, is_valid_KT = _my_part(slots_KW, config), jnp.broadcast_to(valid_T, ids_TK.T.shape)
    mine = SlotAssignments(slots_KT, ids_TK.T, is_valid_KT, taken_N)
    return LimitedAssignments(slots_KT.T, ids_TK, gates_TK, _tally(mine, valid_T, taken_N, config))


def spread_over_replicas(
    ids_KW: jax.Array, valid_W: jax.Array, order: SlotOrder, *, capacity: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return a slot of its expert for every assignment, int32 [K, W] (-1: padding), and tokens per slot [N].

    This is the first slot with free capacity; if an expert has none left, its slots take further tokens round robin.
    """
    num_slots = len(order.expert_N)

    def take(taken_N: jax.Array, ids_W: jax.Array) -> tuple[jax.Array, jax.Array]:
        is_its_own_NW = (order.expert_N[:, None] == ids_W) & valid_W
        keys_NW = jnp.where(is_its_own_NW, 0, NOT_ELIGIBLE)
        slots_W, taken_N = take_one(keys_NW, order, taken_N=taken_N, capacity=capacity)
        return taken_N, slots_W

    _, slots_KW = jax.lax.scan(take, jnp.zeros(num_slots, jnp.int32), ids_KW)
    is_left_KW = (slots_KW == num_slots) & valid_W
    index_KW, _ = place_within_expert(jnp.where(is_left_KW, ids_KW, num_slots), num_slots)
    by_expert_N = jnp.argsort(order.expert_N, stable=True)
    counts_N = jnp.sum(order.expert_N[:, None] == jnp.arange(num_slots), axis=0, dtype=jnp.int32)
    first_N = jnp.cumsum(counts_N) - counts_N
    in_turn_KW = by_expert_N[first_N[ids_KW] + jax.lax.rem(index_KW, jnp.maximum(counts_N[ids_KW], 1))]
    slots_KW = jnp.where(is_left_KW, in_turn_KW.astype(jnp.int32), slots_KW)
    taken_N = jnp.zeros(num_slots, jnp.int32).at[slots_KW.reshape(-1)].add(1, mode="drop")
    return jnp.where(slots_KW < num_slots, slots_KW, -1), taken_N


def order_of_placement(
    maps: PlacementArrays | None, layer: jax.Array, *, num_tokens: int, config: ExpertConfig
) -> SlotOrder:
    """Return the expert and the distance of each slot: on the rank that dispatches a token, on its host, elsewhere.

    `num_tokens` is the number of a data rank; a rank dispatches its part of them (`take_part`).
    """
    num_slots = config.num_slots
    slots_N = jnp.arange(num_slots, dtype=jnp.int32)
    expert_N = slots_N
    if maps is not None:
        experts = jnp.asarray(maps.bounds_LP)[layer] // WHOLE
        expert_N = jnp.zeros(num_slots, jnp.int32).at[jnp.asarray(maps.slots_LP)[layer]].set(experts)
    if config.num_redundant == 0 or config.plan.num_expert_ranks == 1:
        return SlotOrder(expert_N, (expert_N * num_slots + slots_N)[:, None])
    distance_ND = jnp.asarray(distances(config))
    if config.capacity_scope == "data_rank":
        first = config.plan.data_rank() * config.plan.tensor_size
        distance_ND = jax.lax.dynamic_slice_in_dim(distance_ND, first, config.plan.tensor_size, axis=1)
    place_ND = (expert_N[:, None] * (ELSEWHERE + 1) + distance_ND) * num_slots + slots_N[:, None]
    part = -(-num_tokens // config.plan.tensor_size)
    by_rank = jnp.repeat(place_ND, part, axis=1).reshape(num_slots, -1, part * config.plan.tensor_size)
    return SlotOrder(expert_N, by_rank[:, :, :num_tokens].reshape(num_slots, -1))


def distances(config: ExpertConfig) -> np.ndarray:
    """Return the distance of each slot from each rank, int32 [N, R]: OWN_RANK, OWN_HOST or ELSEWHERE."""
    ranks = np.arange(config.plan.num_expert_ranks)
    hosts = np.array([device.process_index for device in config.plan.mesh.devices.flat])
    apart = np.where(hosts[:, None] == hosts, OWN_HOST, ELSEWHERE)
    apart = np.where(ranks[:, None] == ranks, OWN_RANK, apart)
    return np.repeat(apart, config.num_local_slots, axis=0).astype(np.int32)


def _compete(local: jax.Array, config: ExpertConfig) -> jax.Array:
    """Gather an array [T, ...] of this rank's tokens over all tokens that compete with them."""
    return config.plan.gather_data_ranks(local, dim=0) if config.capacity_scope == "global" else local


def _my_part(array_KW: jax.Array, config: ExpertConfig) -> jax.Array:
    if config.capacity_scope != "global" or config.plan.data_size == 1:
        return array_KW
    num_tokens = array_KW.shape[1] // config.plan.data_size
    return jax.lax.dynamic_slice_in_dim(array_KW, config.plan.data_rank() * num_tokens, num_tokens, axis=1)


def _tally(mine: SlotAssignments, valid_T: jax.Array, taken_N: jax.Array, config: ExpertConfig) -> jax.Array:
    """Return the tally of `LimitedAssignments`; the first data rank alone counts the hottest rank."""
    if config.capacity_scope != "global" and config.plan.data_size > 1:
        taken_N = jax.lax.psum(taken_N, DATA)
    hottest = jnp.max(jnp.sum(taken_N.reshape(config.plan.num_expert_ranks, -1), axis=1))
    num_wanted = config.router.top_k * jnp.sum(valid_T, dtype=jnp.int32)
    num_filled = jnp.sum(mine.slots_KB >= 0, dtype=jnp.int32)
    is_first = config.plan.data_rank() == 0
    num_kept = jnp.sum(mine.is_kept_KB, dtype=jnp.int32)
    return jnp.stack([num_wanted, num_kept, num_filled, jnp.where(is_first, hottest, 0).astype(jnp.int32)])


def balanced_expert_selection(  # noqa: PLR0913 (the agreed signature)
    scores: jax.Array,
    slots_of_expert: jax.Array,
    capacity_factor: jax.Array | float,
    *,
    k: int,
    num_slots: int,
    gate_scores: jax.Array | None = None,
    valid: jax.Array | None = None,
    capacity: jax.Array | None = None,
    renormalize: bool = False,
    scale: float = 1.0,
    device_index: jax.Array | int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Select `k` slots per token: ids int32 [B, K], weights float32 [B, K], and the share of assignments kept.

    For each rank in turn, and within it for each token in turn, the token takes the best expert that it does not have
    yet and that has a slot with free capacity, in the first such slot. Experts are ranked by `scores` [B, E], ties by
    the smaller id; experts at NaN or -inf are not eligible, which serves as a mask. If no expert is left, the slot is
    -1 and the weight 0.

    `slots_of_expert` int32 [E, M] lists slots in the order of preference, -1 for none, a slot at most once; rows beyond
    E are of experts that no router selects. As [D, E, M] it has an order for every device, and `device_index` (a number
    or [B]) says which device dispatches a token. Every slot takes `capacity_of` tokens, or `capacity`.

    Weights are the `gate_scores` [B, E] (default: the scores) of the chosen experts, optionally divided by their sum,
    times `scale`. Tokens that are not `valid` [B] take nothing and are not counted. The share counts assignments among
    a token's own best `k`, of `k` for each valid token; 1 without valid tokens.

    Raises: ValueError if `device_index` does not match the shape of `slots_of_expert`.
    """
    num_tokens, num_experts = scores.shape
    valid_B = jnp.ones(num_tokens, bool) if valid is None else valid
    order = order_of_table(slots_of_expert, device_index, num_experts=num_experts, num_slots=num_slots)
    if capacity is None:
        capacity = capacity_of(capacity_factor, valid_B, k=k, num_slots=num_slots)
    assigned = take_best_open(sortable(scores, valid_B), order, k=k, capacity=jnp.asarray(capacity, jnp.int32))
    gates_BE = scores if gate_scores is None else gate_scores
    weights = weights_of(assigned, gates_BE, renormalize=renormalize, scale=scale)
    num_kept, num_wanted = jnp.sum(assigned.is_kept_KB, dtype=jnp.int32), k * jnp.sum(valid_B, dtype=jnp.int32)
    share = num_kept.astype(jnp.float32) / jnp.maximum(num_wanted, 1).astype(jnp.float32)
    return assigned.slots_KB.T, weights, jnp.where(num_wanted > 0, share, 1.0)


def capacity_of(factor: jax.Array | float, valid_B: jax.Array, *, k: int, num_slots: int) -> jax.Array:
    """Return the tokens that a slot takes: the factor times the even load, rounded down, and at least 1; int32.

    Multiplied from left to right and divided in float32, and not as a product with a reciprocal.
    """
    num_valid = jnp.sum(valid_B, dtype=jnp.int32).astype(jnp.float32)
    divisor = jax.lax.optimization_barrier(jnp.float32(num_slots))
    quotient = jnp.asarray(factor, jnp.float32) * num_valid * jnp.float32(k) / divisor
    return jnp.clip(jnp.floor(quotient), 1, max(1, len(valid_B))).astype(jnp.int32)


def order_of_table(
    slots_of_expert: jax.Array, device_index: jax.Array | int | None, *, num_experts: int, num_slots: int
) -> SlotOrder:
    """Return the order of a table of slots [E, M] or [D, E, M]; see `balanced_expert_selection`."""
    if (slots_of_expert.ndim == 3) != (device_index is not None):
        raise ValueError(
            "slots_of_expert has a dimension of devices, or there is no device_index: give both or neither"
        )
    table_DEM = slots_of_expert[..., :num_experts, :].reshape(-1, num_experts, slots_of_expert.shape[-1])
    place_DN = jax.vmap(_places, in_axes=(0, None))(table_DEM.reshape(len(table_DEM), -1), num_slots)
    expert_N = jnp.min(place_DN, axis=0) // (num_slots * table_DEM.shape[-1])
    places = place_DN[jnp.asarray(0 if device_index is None else device_index)]
    return SlotOrder(expert_N, places.reshape(-1, num_slots).T)


def _places(slots_X: jax.Array, num_slots: int) -> jax.Array:
    """Place of every slot in a flat list of slots, times their number, plus the slot: [N]."""
    at_X = jnp.arange(slots_X.size, dtype=jnp.int32) * num_slots
    nowhere_N = jnp.full(num_slots, NO_PLACE, jnp.int32)
    return nowhere_N.at[jnp.where(slots_X < 0, num_slots, slots_X)].min(at_X + slots_X, mode="drop")


def weights_of(
    assigned: SlotAssignments, gates_BE: jax.Array, *, renormalize: bool, scale: float = 1.0, floor: float = 0.0
) -> jax.Array:
    """Return the gates of the assigned experts, float32 [B, K]; 0 without an expert.

    Instead of a division by the sum, or by `floor` if that is larger, gates are multiplied by the reciprocal. XLA
    compiles such a division in the same way.
    """
    experts_BK = assigned.experts_KB.T
    gates_BK = jnp.take_along_axis(gates_BE.astype(jnp.float32), jnp.maximum(experts_BK, 0), axis=1)
    weights_BK = jnp.where(experts_BK >= 0, gates_BK, 0.0)
    if renormalize:
        total_B1 = reduce(add, (weights_BK[:, rank, None] for rank in range(weights_BK.shape[1])))
        total_B1 = jnp.maximum(total_B1, floor) if floor else total_B1
        weights_BK = weights_BK * (1.0 / jnp.where(total_B1 == 0, 1.0, total_B1))
    return weights_BK if scale == 1.0 else weights_BK * scale
