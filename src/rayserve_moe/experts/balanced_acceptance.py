"""Assigning expert slots of limited capacity: rank by rank of the choices, and within a rank in the order of tokens.

A rank is a serial dictatorship: every token takes the slot that it prefers among those with free capacity, the first
token first. Deferred acceptance (Gale and Shapley, 1962) has the same result without a loop over tokens: all tokens
propose to the best slot that has not rejected them, a slot with more proposals than free capacity keeps the first
tokens and rejects the later ones, and so on until no token is rejected. Slots never empty, so a slot that is full for a
token in one rank is full in the next: a token's choice is its best open expert that it does not have yet.
"""

# B tokens = G * C   E experts   N slots   K experts per token

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

COUNTED_AT_ONCE = 512
NOT_ELIGIBLE = np.int32(-(1 << 31))
_INFINITY = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)


class SlotOrder(NamedTuple):
    """The preferences of tokens: the expert of each slot [N] (other numbers: none), and the order of slots.

    Among the slots of an expert, a token prefers the smallest `place`. For experts with equal scores, all places of
    one expert are below all places of the other. A place modulo N is the slot's number. Places are [N, B], or [N, 1] if
    all tokens agree; `NO_PLACE` excludes a slot for a token.
    """

    expert_N: jax.Array
    place_NB: jax.Array


NO_PLACE = np.int32((1 << 31) - 1)


class SlotAssignments(NamedTuple):
    """Slots and their experts in the order of choice, [K, B]; -1 if none was left.

    `is_kept_KB`: the token would have this expert without limits. `taken_N` counts tokens per slot.
    """

    slots_KB: jax.Array
    experts_KB: jax.Array
    is_kept_KB: jax.Array
    taken_N: jax.Array


def sortable(scores_BE: jax.Array, valid_B: jax.Array | None) -> jax.Array:
    """Return scores as int32 [E, B] in the same order: equal zeros, and `NOT_ELIGIBLE` for NaN and -inf.

    Integers, because some devices take subnormal numbers for zero when they compare floats and others do not.
    """
    bits_BE = jax.lax.bitcast_convert_type(scores_BE.astype(jnp.float32), jnp.int32)
    size_BE = bits_BE & _MAGNITUDE
    keys_BE = jnp.where(bits_BE < 0, -size_BE, size_BE)
    is_eligible_BE = (size_BE <= _INFINITY) & (keys_BE != -_INFINITY)
    if valid_B is not None:
        is_eligible_BE &= valid_B[:, None]
    return jnp.where(is_eligible_BE, keys_BE, NOT_ELIGIBLE).T


def take_best_open(keys_EB: jax.Array, order: SlotOrder, *, k: int, capacity: jax.Array) -> SlotAssignments:
    """Assign every token the first slot with free capacity of its best expert, then of the next, `k` times."""
    num_experts = len(keys_EB)
    keys_NB = keys_EB.at[order.expert_N].get(mode="fill", fill_value=NOT_ELIGIBLE)
    keys_NB = jnp.where(order.place_NB < NO_PLACE, keys_NB, NOT_ELIGIBLE)

    def take(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        keys_NB, taken_N = carry
        slots_B, taken_N = take_one(keys_NB, order, taken_N=taken_N, capacity=capacity)
        experts_B = order.expert_N.at[slots_B].get(mode="fill", fill_value=num_experts)
        is_any_B = experts_B < num_experts
        keys_NB = jnp.where(order.expert_N[:, None] == experts_B, NOT_ELIGIBLE, keys_NB)
        taken = jnp.where(is_any_B, slots_B, -1), jnp.where(is_any_B, experts_B, -1)
        return (keys_NB, taken_N), taken

    nothing_N = jnp.zeros(len(order.expert_N), jnp.int32)
    (_, taken_N), (slots_KB, experts_KB) = jax.lax.scan(take, (keys_NB, nothing_N), length=k)
    is_kept_KB = (experts_KB >= 0) & (_num_better(keys_EB, experts_KB) < k)
    return SlotAssignments(slots_KB, experts_KB, is_kept_KB, taken_N)


def take_one(
    keys_NB: jax.Array, order: SlotOrder, *, taken_N: jax.Array, capacity: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Assign a rank: return the slot of every token [B] (N if none was left), and the number of tokens of each slot.

    `keys_NB` ranks the slots of a token, `NOT_ELIGIBLE` excludes a slot.
    """
    num_tokens = keys_NB.shape[1]
    free_N = jnp.minimum(capacity - taken_N, num_tokens)

    def propose(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        limit_N, _, _ = state
        slots_B = _first_open(keys_NB, order, limit_N=limit_N)
        lowered_N, proposed_N = jax.lax.platform_dependent(
            slots_B, limit_N, free_N, tpu=reject_by_counting, default=reject_by_sorting
        )
        return lowered_N, slots_B, proposed_N

    def is_any_rejected(state: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.any(state[2] > jnp.maximum(free_N, 0))

    all_N = jnp.where(free_N > 0, num_tokens, 0).astype(jnp.int32)
    before = all_N, jnp.zeros(num_tokens, jnp.int32), jnp.full_like(taken_N, num_tokens + 1)
    _, slots_B, proposed_N = jax.lax.while_loop(is_any_rejected, propose, before)
    return slots_B, taken_N + proposed_N


def _first_open(keys_NB: jax.Array, order: SlotOrder, *, limit_N: jax.Array) -> jax.Array:
    """Return the slot that each token prefers among slots with a limit above its number [B]; N without such a slot."""
    num_slots, num_tokens = keys_NB.shape
    is_open_NB = limit_N[:, None] > jnp.arange(num_tokens, dtype=jnp.int32)
    open_NB = jnp.where(is_open_NB, keys_NB, NOT_ELIGIBLE)
    max_B = jnp.max(open_NB, axis=0)
    is_best_NB = (open_NB == max_B) & (open_NB > NOT_ELIGIBLE)
    place_B = jnp.min(jnp.where(is_best_NB, order.place_NB, NO_PLACE), axis=0)
    return jnp.where(place_B < NO_PLACE, jax.lax.rem(place_B, num_slots), num_slots)


def reject_by_sorting(slots_B: jax.Array, limit_N: jax.Array, free_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return limits that leave each slot the first proposals within its free capacity, and the number of proposals.

    `slots_B` is the slot that each token proposes to, N for none.
    """
    num_tokens, num_slots = len(slots_B), len(limit_N)
    proposal_B = jnp.sort(slots_B * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32))
    proposed_N = jnp.zeros(num_slots, jnp.int32).at[slots_B].add(1, mode="drop")
    first_out_N = jnp.cumsum(proposed_N) - proposed_N + free_N
    token_N = jax.lax.rem(proposal_B.at[first_out_N].get(mode="clip"), num_tokens)
    return jnp.where(proposed_N > free_N, jnp.minimum(token_N, limit_N), limit_N), proposed_N


def reject_by_counting(slots_B: jax.Array, limit_N: jax.Array, free_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `reject_by_sorting` for devices that multiply matrices faster than they sort or look up.

    A running count is a product with a triangle of ones, exact in float32 for as many as 2**24 tokens.
    """
    num_tokens, num_slots = len(slots_B), len(limit_N)
    proposes_NB = slots_B == jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    width = min(num_tokens, COUNTED_AT_ONCE)
    proposes_NGC = jnp.pad(proposes_NB, ((0, 0), (0, -num_tokens % width))).reshape(num_slots, -1, width)
    ones_CC = jnp.triu(jnp.ones((width, width), jnp.bfloat16))
    count_NGC = jnp.matmul(proposes_NGC.astype(jnp.bfloat16), ones_CC, preferred_element_type=jnp.float32)
    if proposes_NGC.shape[1] > 1:
        count_NGC += (jnp.cumsum(count_NGC[:, :, -1], axis=1) - count_NGC[:, :, -1])[:, :, None]
    count_NB = count_NGC.reshape(num_slots, -1)
    is_out_NB = proposes_NB & (count_NB[:, :num_tokens] > free_N[:, None].astype(jnp.float32))
    tokens_B = jnp.arange(num_tokens, dtype=jnp.int32)
    first_out_N = jnp.min(jnp.where(is_out_NB, tokens_B, num_tokens), axis=1)
    return jnp.minimum(first_out_N, limit_N), count_NB[:, -1].astype(jnp.int32)


def _num_better(keys_EB: jax.Array, experts_KB: jax.Array) -> jax.Array:
    """Return the number of experts before these in each token's ranking [K, B]."""
    keys_KB = jnp.take_along_axis(keys_EB, jnp.clip(experts_KB, 0, len(keys_EB) - 1), axis=0)
    is_before_KEB = jnp.arange(len(keys_EB), dtype=jnp.int32)[:, None] < experts_KB[:, None]
    is_better_KEB = (keys_EB > keys_KB[:, None]) | ((keys_EB == keys_KB[:, None]) & is_before_KEB)
    return jnp.sum(is_better_KEB, axis=1, dtype=jnp.int32)
