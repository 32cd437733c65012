"""Bringing assignments into the order of their slots, and rows from one order into another."""

# T tokens   K slots of a token   P assignments = T * K   N rows of an array

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MOST_COMPARED = 1024
"""Assignments that are each compared with all others. Beyond, sorting takes less time; below, on a TPU, it takes more
operations: two sorts are several, and a sum of comparisons is one."""


class SortedAssignments(NamedTuple):
    """Assignments slot after slot, those of a slot as they came: `token_P` has the token of each in this order,
    `place_P` the place in this order of each assignment."""

    token_P: jax.Array
    place_P: jax.Array


def order_by_slot(slots_TK: jax.Array, num_slots: int) -> SortedAssignments:
    """Sort the assignments of tokens to slots; those of `num_slots` or beyond come last, as they came."""
    top_k, slots_P = slots_TK.shape[1], jnp.minimum(slots_TK.reshape(-1), num_slots)
    if slots_P.size > MOST_COMPARED:
        order_P = jnp.argsort(slots_P, stable=True)
        return SortedAssignments(jax.lax.div(order_P, top_k), inverse(order_P))
    number_P = np.arange(slots_P.size, dtype=np.int32)
    is_before_PP = (slots_P < slots_P[:, None]) | ((slots_P == slots_P[:, None]) & (number_P < number_P[:, None]))
    place_P = jnp.sum(is_before_PP, axis=1, dtype=jnp.int32)
    return SortedAssignments(jnp.sum(jnp.where(place_P == number_P[:, None], number_P // top_k, 0), axis=1), place_P)


def inverse(order_P: jax.Array) -> jax.Array:
    """The permutation that undoes `order_P`: on a CPU by a scatter, which takes a TPU ten times as long as a sort."""

    def scattered(order_P: jax.Array) -> jax.Array:
        place_P = jnp.arange(order_P.size, dtype=order_P.dtype)
        return jnp.zeros_like(order_P).at[order_P].set(place_P, unique_indices=True)

    return jax.lax.platform_dependent(order_P, cpu=scattered, default=partial(jnp.argsort, stable=False))


def take(rows_N: jax.Array, places_P: jax.Array) -> jax.Array:
    """The rows [P, ...] at `places_P` of [N, ...], which are known to be in 0..N-1."""
    return rows_N.at[places_P].get(mode="promise_in_bounds", wrap_negative_indices=False)
