"""Sorting of assignments by slot, and reordering of rows."""

# T tokens   K slots of a token   P assignments = T * K   N rows of an array

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MAX_COMPARED = 1024
"""Maximum number of assignments that are compared pairwise. Sorting more takes less time; for fewer, on a TPU, two
sorts are several operations, and a sum of comparisons is a single operation."""


class SortedAssignments(NamedTuple):
    """Assignments by slot, in their order within a slot: `token_P` has the token of each in this order, `place_P` the
    place of each assignment."""

    token_P: jax.Array
    place_P: jax.Array


def order_by_slot(slots_TK: jax.Array, num_slots: int) -> SortedAssignments:
    """Sort the assignments of tokens to slots; slots of `num_slots` or beyond come last, in their order."""
    top_k, slots_P = slots_TK.shape[1], jnp.minimum(slots_TK.reshape(-1), num_slots)
    if slots_P.size > MAX_COMPARED:
        order_P = jnp.argsort(slots_P, stable=True)
        return SortedAssignments(jax.lax.div(order_P, top_k), inverse(order_P))
    number_P = np.arange(slots_P.size, dtype=np.int32)
    is_before_PP = (slots_P < slots_P[:, None]) | ((slots_P == slots_P[:, None]) & (number_P < number_P[:, None]))
    place_P = jnp.sum(is_before_PP, axis=1, dtype=jnp.int32)
    return SortedAssignments(jnp.sum(jnp.where(place_P == number_P[:, None], number_P // top_k, 0), axis=1), place_P)


def inverse(order_P: jax.Array) -> jax.Array:
    """Return the permutation that undoes `order_P`: on a CPU by a scatter, ten times slower than a sort on a TPU."""

    def scattered(order_P: jax.Array) -> jax.Array:
        place_P = jnp.arange(order_P.size, dtype=order_P.dtype)
        return jnp.zeros_like(order_P).at[order_P].set(place_P, unique_indices=True)

    return jax.lax.platform_dependent(order_P, cpu=scattered, default=partial(jnp.argsort, stable=False))


def take(rows_N: jax.Array, places_P: jax.Array) -> jax.Array:
    """Return the rows [P, ...] at `places_P` of [N, ...]; places must be in 0..N-1."""
    return rows_N.at[places_P].get(mode="promise_in_bounds", wrap_negative_indices=False)
