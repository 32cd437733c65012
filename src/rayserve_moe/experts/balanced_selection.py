"""Choosing experts under a capacity per slot: a full slot's tokens go to a replica, or to their next best expert.

This changes what a model computes, and the result of a token depends on the other tokens of the step: it is used only
where the settings ask for it.
"""

# B tokens   E experts   M slots of an expert at most   N slots   D devices   K experts per token

from __future__ import annotations

from functools import reduce
from operator import add

import jax
import jax.numpy as jnp

from rayserve_moe.experts.balanced_acceptance import NO_PLACE, SlotAssignments, SlotOrder, sortable, take_best_open


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
    yet and that has a slot with free capacity, and of its slots the first such one. Experts are ranked by `scores` [B,
    E], ties by the smaller id; those at NaN or -inf are not eligible, which is how a mask is given. Where no expert is
    left, the slot is -1 and the weight 0.

    `slots_of_expert` int32 [E, M] lists slots in the order of preference, -1 for none, a slot at most once; rows beyond
    E are of experts that no router selects. As [D, E, M] it has an order for every device, and `device_index` (a number
    or [B]) says which device dispatches a token. Every slot takes `capacity_of` tokens, or `capacity`.

    Weights are the `gate_scores` [B, E] (the scores where there are none) at what was taken, if wanted divided by their
    sum, times `scale`. Tokens that are not `valid` [B] take nothing and are not counted. The share counts assignments
    among a token's own best `k`, of `k` for each valid token; 1 where there is none. ValueError where `device_index`
    and the shape of `slots_of_expert` do not go together.
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
    """Tokens that a slot takes: the factor times the even load, rounded down, and 1 at least; int32.

    Multiplied from left to right and divided in float32, and not as a product with a reciprocal.
    """
    num_valid = jnp.sum(valid_B, dtype=jnp.int32).astype(jnp.float32)
    divisor = jax.lax.optimization_barrier(jnp.float32(num_slots))
    quotient = jnp.asarray(factor, jnp.float32) * num_valid * jnp.float32(k) / divisor
    return jnp.clip(jnp.floor(quotient), 1, max(1, len(valid_B))).astype(jnp.int32)


def order_of_table(
    slots_of_expert: jax.Array, device_index: jax.Array | int | None, *, num_experts: int, num_slots: int
) -> SlotOrder:
    """The order that a table of slots [E, M] or [D, E, M] states; see `balanced_expert_selection`."""
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
    """Float32 [B, K]: gates at the experts that were assigned, 0 where none was.

    What is divided by the sum, or by `floor` where that is larger, is multiplied by its reciprocal, which is what XLA
    makes of such a division anyway.
    """
    experts_BK = assigned.experts_KB.T
    gates_BK = jnp.take_along_axis(gates_BE.astype(jnp.float32), jnp.maximum(experts_BK, 0), axis=1)
    weights_BK = jnp.where(experts_BK >= 0, gates_BK, 0.0)
    if renormalize:
        total_B1 = reduce(add, (weights_BK[:, rank, None] for rank in range(weights_BK.shape[1])))
        total_B1 = jnp.maximum(total_B1, floor) if floor else total_B1
        weights_BK = weights_BK * (1.0 / jnp.where(total_B1 == 0, 1.0, total_B1))
    return weights_BK if scale == 1.0 else weights_BK * scale
