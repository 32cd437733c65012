"""Handing out expert slots with limited room: rank by rank of the picks, and within a rank in the order of tokens.

A rank's picks are a serial dictatorship: every token takes the slot it likes best among those with room, the first
token first. Deferred acceptance comes to the same without going from token to token: all tokens ask for the best slot
that has not turned them away, a slot that is asked by more than it has room for keeps the first of them and turns away
whoever comes later, and so on until nobody is turned away. Slots never empty, so what had no room for a token in one
rank has none in the next: a token's choice is its best open expert that it does not have yet.
"""

# B tokens = G * C   E experts   N slots   K picks

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
    """What tokens think of slots: whose expert each one holds [N] (any other number: nobody's), and in which order.

    Of the slots of one expert a token likes that best whose `place` is smallest; of experts with equal scores all
    places of one lie below those of the other. A place leaves the slot's number when it is divided by N. [N, B], or
    [N, 1] where all tokens agree; `NO_PLACE` where a token cannot go.
    """

    expert_N: jax.Array
    place_NB: jax.Array


NO_PLACE = np.int32((1 << 31) - 1)


class SlotPicks(NamedTuple):
    """Slots and their experts in the order of picking, [K, B]; -1 where nothing was to be had.

    `is_kept_KB`: the pick is one that the token would have made without limits. `taken_N` counts tokens per slot.
    """

    slots_KB: jax.Array
    experts_KB: jax.Array
    is_kept_KB: jax.Array
    taken_N: jax.Array


def sortable(scores_BE: jax.Array, valid_B: jax.Array | None) -> jax.Array:
    """Scores as int32 [E, B] that compare as the numbers do: equal zeros, and `NOT_ELIGIBLE` for NaN and -inf.

    Integers, because some devices take subnormal numbers for zero when they compare floats and others do not.
    """
    bits_BE = jax.lax.bitcast_convert_type(scores_BE.astype(jnp.float32), jnp.int32)
    size_BE = bits_BE & _MAGNITUDE
    keys_BE = jnp.where(bits_BE < 0, -size_BE, size_BE)
    is_eligible_BE = (size_BE <= _INFINITY) & (keys_BE != -_INFINITY)
    if valid_B is not None:
        is_eligible_BE &= valid_B[:, None]
    return jnp.where(is_eligible_BE, keys_BE, NOT_ELIGIBLE).T


def take_best_open(keys_EB: jax.Array, order: SlotOrder, *, k: int, capacity: jax.Array) -> SlotPicks:
    """Every token takes the first slot with room of its best expert, then of the next, `k` times; see `SlotPicks`."""
    num_experts = len(keys_EB)
    likes_NB = keys_EB.at[order.expert_N].get(mode="fill", fill_value=NOT_ELIGIBLE)
    likes_NB = jnp.where(order.place_NB < NO_PLACE, likes_NB, NOT_ELIGIBLE)

    def take(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        likes_NB, taken_N = carry
        slots_B, taken_N = take_one(likes_NB, order, taken_N=taken_N, capacity=capacity)
        experts_B = order.expert_N.at[slots_B].get(mode="fill", fill_value=num_experts)
        is_any_B = experts_B < num_experts
        likes_NB = jnp.where(order.expert_N[:, None] == experts_B, NOT_ELIGIBLE, likes_NB)
        picked = jnp.where(is_any_B, slots_B, -1), jnp.where(is_any_B, experts_B, -1)
        return (likes_NB, taken_N), picked

    nothing_N = jnp.zeros(len(order.expert_N), jnp.int32)
    (_, taken_N), (slots_KB, experts_KB) = jax.lax.scan(take, (likes_NB, nothing_N), length=k)
    is_kept_KB = (experts_KB >= 0) & (_num_better(keys_EB, experts_KB) < k)
    return SlotPicks(slots_KB, experts_KB, is_kept_KB, taken_N)


def take_one(
    likes_NB: jax.Array, order: SlotOrder, *, taken_N: jax.Array, capacity: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One rank: the slot of every token [B] (N where nothing was to be had), and how many each slot now has.

    `likes_NB` says how much, `NOT_ELIGIBLE` not at all.
    """
    num_tokens = likes_NB.shape[1]
    room_N = jnp.minimum(capacity - taken_N, num_tokens)

    def ask(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        limit_N, _, _ = state
        slots_B = _first_open(likes_NB, order, limit_N=limit_N)
        lowered_N, asked_N = jax.lax.platform_dependent(
            slots_B, limit_N, room_N, tpu=turn_away_by_counting, default=turn_away_by_sorting
        )
        return lowered_N, slots_B, asked_N

    def is_anyone_turned_away(state: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.any(state[2] > jnp.maximum(room_N, 0))

    everyone_N = jnp.where(room_N > 0, num_tokens, 0).astype(jnp.int32)
    before = everyone_N, jnp.zeros(num_tokens, jnp.int32), jnp.full_like(taken_N, num_tokens + 1)
    _, slots_B, asked_N = jax.lax.while_loop(is_anyone_turned_away, ask, before)
    return slots_B, taken_N + asked_N


def _first_open(likes_NB: jax.Array, order: SlotOrder, *, limit_N: jax.Array) -> jax.Array:
    """The slot that each token likes best of those that take tokens of its number: [B]; N where there is none."""
    num_slots, num_tokens = likes_NB.shape
    is_open_NB = limit_N[:, None] > jnp.arange(num_tokens, dtype=jnp.int32)
    open_NB = jnp.where(is_open_NB, likes_NB, NOT_ELIGIBLE)
    most_B = jnp.max(open_NB, axis=0)
    is_best_NB = (open_NB == most_B) & (open_NB > NOT_ELIGIBLE)
    place_B = jnp.min(jnp.where(is_best_NB, order.place_NB, NO_PLACE), axis=0)
    return jnp.where(place_B < NO_PLACE, jax.lax.rem(place_B, num_slots), num_slots)


def turn_away_by_sorting(slots_B: jax.Array, limit_N: jax.Array, room_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Limits that leave each slot as many of those who ask as it has room for, the first ones; and how many ask.

    `slots_B` is the slot that each token asks, N for none.
    """
    num_tokens, num_slots = len(slots_B), len(limit_N)
    asking_B = jnp.sort(slots_B * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32))
    asked_N = jnp.zeros(num_slots, jnp.int32).at[slots_B].add(1, mode="drop")
    first_out_N = jnp.cumsum(asked_N) - asked_N + room_N
    token_N = jax.lax.rem(asking_B.at[first_out_N].get(mode="clip"), num_tokens)
    return jnp.where(asked_N > room_N, jnp.minimum(token_N, limit_N), limit_N), asked_N


def turn_away_by_counting(slots_B: jax.Array, limit_N: jax.Array, room_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same for devices that multiply matrices faster than they sort or look up.

    A running count is a product with a triangle of ones, exact in float32 for as many as 2**24 tokens.
    """
    num_tokens, num_slots = len(slots_B), len(limit_N)
    asks_NB = slots_B == jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    width = min(num_tokens, COUNTED_AT_ONCE)
    asks_NGC = jnp.pad(asks_NB, ((0, 0), (0, -num_tokens % width))).reshape(num_slots, -1, width)
    ones_CC = jnp.triu(jnp.ones((width, width), jnp.bfloat16))
    count_NGC = jnp.matmul(asks_NGC.astype(jnp.bfloat16), ones_CC, preferred_element_type=jnp.float32)
    if asks_NGC.shape[1] > 1:
        count_NGC += (jnp.cumsum(count_NGC[:, :, -1], axis=1) - count_NGC[:, :, -1])[:, :, None]
    count_NB = count_NGC.reshape(num_slots, -1)
    is_out_NB = asks_NB & (count_NB[:, :num_tokens] > room_N[:, None].astype(jnp.float32))
    tokens_B = jnp.arange(num_tokens, dtype=jnp.int32)
    first_out_N = jnp.min(jnp.where(is_out_NB, tokens_B, num_tokens), axis=1)
    return jnp.minimum(first_out_N, limit_N), count_NB[:, -1].astype(jnp.int32)


def _num_better(keys_EB: jax.Array, experts_KB: jax.Array) -> jax.Array:
    """How many experts come before these in each token's ranking: [K, B]."""
    keys_KB = jnp.take_along_axis(keys_EB, jnp.clip(experts_KB, 0, len(keys_EB) - 1), axis=0)
    is_before_KEB = jnp.arange(len(keys_EB), dtype=jnp.int32)[:, None] < experts_KB[:, None]
    is_better_KEB = (keys_EB > keys_KB[:, None]) | ((keys_EB == keys_KB[:, None]) & is_before_KEB)
    return jnp.sum(is_better_KEB, axis=1, dtype=jnp.int32)
