"""Rows of tokens that go once to each rank of a token's experts, the runs of exchanged rows, and their adapters.

A rank that has several of a token's experts receives the token's hidden state once, and copies it to each of them. What
comes back is a row for each expert, because a sum over a rank's experts would depend on the placement. For this, all
ranks gather the slots of all tokens; these alone determine the place of every row, at its sender and its receiver:

    sender's rows    [ to rank 0 | to rank 1 | ... | unused ]       in the order of tokens
    receiver's rows  [ from rank 0 | from rank 1 | ... | unused ]
"""

# T tokens of a chunk   K experts per token   N assignments = T * K   R ranks   B rows sent = T * min(K, R)
# M rows received = R * T   A assignments of all ranks = R * N   S local slots   Y slots, then ranks
# C rows of a round

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.balancing.placement import ONCE_ASSIGNMENTS
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.kernels.slot_order import SortedAssignments, order_by_slot, take

LANES = 128


class Runs(NamedTuple):
    """Rows between this rank and each rank: their number, and their first row in the order of sender and receiver."""

    counts_R: jax.Array
    at_sender_R: jax.Array
    at_receiver_R: jax.Array


class RankRows(NamedTuple):
    """The way of rows that go once to each rank."""

    token_B: jax.Array
    """Token of each row to send."""
    sent: Runs
    """Runs that this rank sends."""
    received: Runs
    """Runs that this rank receives, of at most R * T rows."""
    row_A: jax.Array
    """Received row of each assignment to this rank, by sender and slot; the others come last."""


def count_slots(slots_N: jax.Array, num_ranks: int, num_slots: int) -> jax.Array:
    """Count the assignments [..., N] to each slot, then to each rank: [..., Y].

    The numbers are a multiple of `LANES`: others TPUs do not gather, but add up.
    """
    ends_S, ends_R = np.arange(1, num_slots + 1), np.arange(1, num_ranks + 1) * (num_slots // num_ranks)
    none = np.zeros(-(num_slots + num_ranks) % LANES, np.int32)
    end_Y = np.concatenate([ends_S, ends_R, none]).astype(np.int32)
    first_Y = np.concatenate([ends_S - 1, ends_R - num_slots // num_ranks, none]).astype(np.int32)
    is_in_NY = (slots_N[..., None] >= first_Y) & (slots_N[..., None] < end_Y)
    return jnp.sum(is_in_NY, axis=-2, dtype=jnp.int32)


def runs_between(sent_RR: jax.Array, me: jax.Array) -> tuple[Runs, Runs]:
    """Return the runs that rank `me` sends and receives, from the rows of each sender to each receiver."""
    ranks_R = jnp.asarray(np.arange(len(sent_RR)))

    def total(is_counted_R: jax.Array, axis: int) -> jax.Array:
        return jnp.sum(jnp.where(jnp.expand_dims(is_counted_R, 1 - axis), sent_RR, 0), axis=axis)

    def begins(counts_R: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(ranks_R < ranks_R[:, None], counts_R, 0), axis=1)

    to_R, from_R = (total(ranks_R == me, axis) for axis in (0, 1))
    sent = Runs(to_R, begins(to_R), total(ranks_R < me, 0))
    return sent, Runs(from_R, total(ranks_R < me, 1), begins(from_R))


def part_of_runs(runs: Runs, turn: jax.Array | int, *, round_rows: int) -> Runs:
    """Return the part of each run that a round takes; the receiver's places are those in the round."""
    begin_R = turn * round_rows - runs.at_receiver_R
    low_R = jnp.clip(begin_R, 0, runs.counts_R)
    counts_R = jnp.clip(begin_R + round_rows, 0, runs.counts_R) - low_R
    some_R = counts_R > 0
    return Runs(counts_R, jnp.where(some_R, runs.at_sender_R + low_R, 0), jnp.where(some_R, low_R - begin_R, 0))


def plan_rank_rows(slots_RTK: jax.Array, me: jax.Array, *, num_slots: int) -> RankRows:
    """Place the rows of all ranks' tokens, by the slots of their assignments; `num_slots` or beyond is nowhere."""
    num_ranks, num_tokens, top_k = slots_RTK.shape
    num_local, rank_R = num_slots // num_ranks, np.arange(num_ranks, dtype=np.int32)
    is_sent_RTR = jnp.any(jax.lax.div(slots_RTK, num_local)[..., None] == rank_R, axis=2)
    sent, received = runs_between(jnp.sum(is_sent_RTR, axis=1, dtype=jnp.int32), me)
    own_TR = jax.lax.dynamic_index_in_dim(is_sent_RTR, me, keepdims=False)
    token_M = order_by_slot(jnp.where(own_TR, rank_R, num_ranks), num_ranks).token_P
    is_mine_RT = jax.lax.dynamic_index_in_dim(is_sent_RTR, me, axis=2, keepdims=False)
    row_RT = received.at_receiver_R[:, None] + jnp.cumsum(is_mine_RT, axis=1, dtype=jnp.int32) - is_mine_RT
    local_RTK = slots_RTK - me * num_local
    is_mine_RTK = (local_RTK >= 0) & (local_RTK < num_local)
    pair_RTK = jnp.where(is_mine_RTK, local_RTK + num_local * rank_R[:, None, None], num_slots)
    token_A = order_by_slot(pair_RTK.reshape(-1, top_k), num_slots).token_P
    row_M = jnp.minimum(row_RT.reshape(-1), num_ranks * num_tokens - 1)
    return RankRows(token_M[: num_tokens * min(top_k, num_ranks)], sent, received, take(row_M, token_A))


def rows_of_round(received_MQV: jax.Array, rows: RankRows, turn: jax.Array | int, *, round_rows: int) -> jax.Array:
    """Return a row [C, Q, V] for each assignment of a round; beyond the last, any rows."""
    row_A = jnp.pad(rows.row_A, (0, -rows.row_A.size % round_rows))
    return take(received_MQV, jax.lax.dynamic_slice_in_dim(row_A, turn * round_rows, round_rows))


def gather_adapters(
    adapter_T: jax.Array | None, order: SortedAssignments, *, axes: tuple[str, ...]
) -> jax.Array | None:
    """Return the adapter of each assignment of every rank, in the order of its rows, int32 [R, N]; None for None."""
    if adapter_T is None:
        return None
    adapter_N = take(adapter_T, order.token_P)
    # On TPUs, XLA gathers only whole lanes and turns other gathers into sums.
    return jax.lax.all_gather(jnp.pad(adapter_N, (0, -adapter_N.size % LANES)), axes)


def received_adapters(
    adapter_RN: jax.Array | None, received: Runs, *, place_C: jax.Array | np.ndarray, sender_C: jax.Array
) -> jax.Array | None:
    """Return the adapter of each received row, by its sender and its place among all received rows, int32 [C]."""
    if adapter_RN is None:
        return None
    at_sender_C = place_C + (received.at_sender_R - received.at_receiver_R).at[sender_C].get(mode="clip")
    return adapter_RN.at[sender_C, at_sender_C].get(mode="clip")


def sends_once(chunk: int, row_bytes: int, *, config: ExpertConfig) -> bool:
    """Return True if fewer bytes reach a device when a row of `row_bytes` goes once to each rank of a token.

    Rows are counted for `chunk` tokens of a device with even routing, and against them the slots that are gathered in
    place of counts. Only rows between slices are worth the gathering and sorting, of not too many assignments.
    """
    num_ranks, top_k = config.plan.num_expert_ranks, config.router.top_k
    num_assigned = num_ranks * chunk * top_k
    if config.plan.num_slices == 1 or top_k == 1 or num_assigned > ONCE_ASSIGNMENTS:
        return False
    repeated = top_k - distinct_ranks(num_ranks, top_k)
    saved = chunk * repeated * row_bytes * (num_ranks - 1) / num_ranks
    return saved > 4 * (num_assigned - num_ranks * (config.num_slots + num_ranks))


def distinct_ranks(num_ranks: int, top_k: int) -> float:
    """Return the mean number of ranks that hold `top_k` evenly chosen experts."""
    return num_ranks * (1 - (1 - 1 / num_ranks) ** top_k)
