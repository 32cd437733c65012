"""Rows of tokens for other devices, the sums of a device's experts, and the sums of devices, by plain XLA.

A token has one row for each device that holds any of its experts. The device adds up its experts for the row, in the
order of slots, and the token's own device adds up the sums of devices, in their order. Results of experts and sums of
devices have the dtype of tokens; additions are in float32.
"""

# T tokens of a device   D model width = Q * V, V lanes   N rows that a device sends   C rows that it receives   R ranks
# K experts per token   A assignments of a sender, T * K   S local slots

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.reference.expert_products import LayerExperts, Multiply
from rayserve_moe.kernels.slot_order import take

LANES = 128
MAX_ROWS = 8192
"""Maximum number of rows that a device receives at once."""


class SlotLists(NamedTuple):
    """The assignments of all senders, each sender's in the order of slots, and where those of this device lie."""

    begin_RS: jax.Array
    """First assignment of each local slot in a sender's list, and the end of the last slot: int32 [R, S + 1]."""
    base_R: jax.Array
    """First received row of each sender, and the end of the last sender's rows: int32 [R + 1]."""
    places_RA: jax.Array
    """Row of each assignment among the rows of its sender for its device."""
    gates_RA: jax.Array
    """Weight of each assignment, float32."""


@dataclass(frozen=True)
class DeviceSumKernels:
    """The operations of an exchange with a row for each token and device."""

    place_rows: Callable[..., jax.Array]
    """`place_rows`."""
    sum_experts: Callable[..., jax.Array]
    """`sum_experts` with its product bound."""
    add_rows: Callable[..., jax.Array]
    """`add_rows`."""
    max_rows: Callable[[int, int, int], int]
    """Return the maximum number of rows that a device can receive, by the widths of the model and of an expert, and the
    experts of a token."""


def place_rows(hidden_TD: jax.Array, token_N: jax.Array, num_rows: jax.Array) -> jax.Array:
    """Return the rows to send [N, Q, V]: of the token `token_N` each. Rows from `num_rows` on hold anything."""
    del num_rows
    num_tokens, width = hidden_TD.shape
    lanes = LANES if width % LANES == 0 else width
    return take(hidden_TD.reshape(num_tokens, width // lanes, lanes), token_N)


def sum_experts(rows_CQV: jax.Array, lists: SlotLists, experts: LayerExperts, *, multiply: Multiply) -> jax.Array:
    """Return the sum of gate * expert of each received row over the local slots, in their order: [C, Q, V]."""
    num_slots, (num_ranks, num_assigned) = experts.config.num_slots, lists.places_RA.shape
    number_A = np.arange(num_assigned, dtype=np.int32)
    ends_RS1 = lists.begin_RS[:, :, None]
    slot_RA = jnp.sum(ends_RS1 <= number_A, axis=1, dtype=jnp.int32) - 1
    slot_P = jnp.where(slot_RA < 0, num_slots, slot_RA).reshape(-1)
    row_P = jnp.where(slot_P < num_slots, (lists.base_R[:num_ranks, None] + lists.places_RA).reshape(-1), 0)
    results_PQV = multiply(take(rows_CQV, row_P), slot_P[:, None], experts)[:, 0].astype(jnp.float32)
    weighted_PQV = lists.gates_RA.reshape(-1, 1, 1) * results_PQV
    total_CQV = jnp.zeros(rows_CQV.shape, jnp.float32)
    for slot in range(num_slots):
        own_P = jnp.where(slot_P == slot, row_P, len(rows_CQV))
        total_CQV = total_CQV.at[own_P].add(weighted_PQV, mode="drop")
    return total_CQV.astype(rows_CQV.dtype)


def add_rows(rows_NQV: jax.Array, places_RT: jax.Array, num_rows: jax.Array) -> jax.Array:
    """Return the sum of each token's rows, in the order of ranks: [T, D]. A place of N is no row."""
    del num_rows
    num_tokens = places_RT.shape[1]
    total_TQV = jnp.zeros((num_tokens, *rows_NQV.shape[1:]), jnp.float32)
    for places_T in places_RT:
        is_row_T = places_T < len(rows_NQV)
        found_TQV = take(rows_NQV, jnp.where(is_row_T, places_T, 0)).astype(jnp.float32)
        total_TQV += jnp.where(is_row_T[:, None, None], found_TQV, 0.0)
    return total_TQV.astype(rows_NQV.dtype).reshape(num_tokens, -1)


def max_rows(width: int, inner: int, top_k: int) -> int:
    """Return the maximum number of rows that a device can receive."""
    del width, inner, top_k
    return MAX_ROWS
