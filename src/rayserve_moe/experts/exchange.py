"""The way of token rows between ranks: each pick's row to the rank of its slot, its result back home.

A rank sorts its picks by slot; slots lie rank after rank, so what goes to one rank lies together. Everybody learns how
many picks go from each rank to each slot, and from that alone where every row lies and where it goes:

    sender's rows    [ to rank 0 | to rank 1 | ... | padding ]        in the order of slots
    receiver's rows  [ from rank 0 | from rank 1 | ... ]              cut into rounds of `round_rows`

Results come back per pick and are added at home in router order, never as sums per rank. On their way rows are cut
into lanes, so that on a TPU each one lies together in memory.
"""

# T tokens of a chunk   K experts per token   N picks = T * K   D model width = Q * V, V lanes   R ranks
# P slots of all ranks   S local slots   X (sender, local slot) pairs = R * S   C rows of a round

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.local import inverse
from rayserve_moe.kernels.ragged_exchange import RaggedSlices, ragged_all_to_all

Multiply = Callable[[jax.Array, jax.Array], jax.Array]

LANES = 128


@dataclass(frozen=True)
class ExchangeRule:
    """What is fixed about an exchange: mesh axes, ranks over them, slots of all ranks, rows taken per round."""

    axes: tuple[str, ...]
    num_ranks: int
    num_slots: int
    round_rows: int


class Route(NamedTuple):
    """Where the rows of one chunk go.

    `order_N` sorts the picks by slot, padding last. Of the rows from each rank to each rank, `sent_RR` counts them,
    and `at_sender_RR` and `at_receiver_RR` say where they begin in the sender's and in the receiver's order. `ends_X`
    says where the rows of each (sender, local slot) end in this rank's receiving order.
    """

    order_N: jax.Array
    sent_RR: jax.Array
    at_sender_RR: jax.Array
    at_receiver_RR: jax.Array
    ends_X: jax.Array


class Underway(NamedTuple):
    """The first round of a chunk on its way: its route, and rows, first those received, then their results."""

    route: Route
    rows_CQV: jax.Array


class Chunk(NamedTuple):
    """Tokens to exchange: hidden states [T, D], slot of each pick [T, K] over all ranks' slots, gates [T, K].

    A slot of `num_slots` or beyond is a pick that goes nowhere.
    """

    hidden_TD: jax.Array
    slots_TK: jax.Array
    gates_TK: jax.Array


def exchange_chunk(chunk: Chunk, *, multiply: Multiply, rule: ExchangeRule) -> jax.Array:
    """Send a chunk's rows out, multiply what arrives, bring results home and add them up: [T, D].

    `multiply(rows_CQV, slots_C)` returns the results, of the rows' shape. An empty row holds anything and has the
    number of local slots for its slot; its result is of no consequence.
    """
    if _fits_one_round(chunk, rule):
        underway = multiply_chunk(send_chunk(chunk, rule=rule), multiply=multiply, rule=rule)
        return finish_chunk(chunk, underway, multiply=multiply, rule=rule)
    route = plan_route(chunk.slots_TK, rule=rule)
    home_NQV = _rounds(chunk, route, _nothing_home(chunk), first=0, multiply=multiply, rule=rule)
    return _add_up(chunk, route, home_NQV, rule)


def send_chunk(chunk: Chunk, *, rule: ExchangeRule) -> Underway:
    """First stage of an exchange done by hand: plan the way and send the first round."""
    route = plan_route(chunk.slots_TK, rule=rule)
    return Underway(route, _dispatch(_rows_to_send(chunk, route), route, 0, rule))


def multiply_chunk(underway: Underway, *, multiply: Multiply, rule: ExchangeRule) -> Underway:
    """Second stage: multiply what arrived in the first round."""
    route, rows_CQV = underway
    return Underway(route, multiply(rows_CQV, _slots_of_round(route, 0, rule)))


def finish_chunk(chunk: Chunk, multiplied: Underway, *, multiply: Multiply, rule: ExchangeRule) -> jax.Array:
    """Last stage: bring results home, do further rounds where a rank is overfull, and add results up: [T, D]."""
    route, rows_CQV = multiplied
    home_NQV = _bring_home(rows_CQV, _nothing_home(chunk), route, 0, rule)
    if not _fits_one_round(chunk, rule):
        home_NQV = _rounds(chunk, route, home_NQV, first=1, multiply=multiply, rule=rule)
    return _add_up(chunk, route, home_NQV, rule)


def plan_route(slots_TK: jax.Array, *, rule: ExchangeRule) -> Route:
    """Sort the picks by slot and learn what every rank sends."""
    slots_N = jnp.minimum(slots_TK.reshape(-1), rule.num_slots)
    counts_P = jnp.sum(slots_N[:, None] == jnp.arange(rule.num_slots), axis=0, dtype=jnp.int32)
    counts_RRS = jax.lax.all_gather(counts_P, rule.axes).reshape(rule.num_ranks, rule.num_ranks, -1)
    mine_RS = jax.lax.dynamic_index_in_dim(counts_RRS, jax.lax.axis_index(rule.axes), axis=1, keepdims=False)
    sent_RR = counts_RRS.sum(-1)
    return Route(
        order_N=jnp.argsort(slots_N, stable=True),
        sent_RR=sent_RR,
        at_sender_RR=jnp.cumsum(sent_RR, axis=1) - sent_RR,
        at_receiver_RR=jnp.cumsum(sent_RR, axis=0) - sent_RR,
        ends_X=jnp.cumsum(mine_RS.reshape(-1)),
    )


def rows_sent(slots_TK: jax.Array, rank: jax.Array | int, *, num_slots: int, num_ranks: int) -> jax.Array:
    """How many rows rank `rank` sends to other ranks, one way; as many results come back. Int32, a scalar."""
    to_rank_TK = slots_TK // (num_slots // num_ranks)
    return jnp.sum((to_rank_TK != rank) & (slots_TK < num_slots), dtype=jnp.int32)


def _fits_one_round(chunk: Chunk, rule: ExchangeRule) -> bool:
    """Whether a rank can take all there is at once, even if everybody sends everything there."""
    return rule.num_ranks * chunk.slots_TK.size <= rule.round_rows


def _rounds(
    chunk: Chunk, route: Route, home_NQV: jax.Array, *, first: int, multiply: Multiply, rule: ExchangeRule
) -> jax.Array:
    """Rounds from number `first` on, as many as the fullest rank needs: every rank does the same number."""

    def round_trip(turn: jax.Array, home_NQV: jax.Array) -> jax.Array:
        received_CQV = _dispatch(_rows_to_send(chunk, route), route, turn, rule)
        return _bring_home(multiply(received_CQV, _slots_of_round(route, turn, rule)), home_NQV, route, turn, rule)

    fullest = jnp.max(jnp.sum(route.sent_RR, axis=0))
    num_rounds = jax.lax.div(fullest + rule.round_rows - 1, rule.round_rows)
    return jax.lax.fori_loop(first, num_rounds, round_trip, home_NQV)


def _row_shape(width: int) -> tuple[int, int]:
    lanes = LANES if width % LANES == 0 else width
    return width // lanes, lanes


def _rows_to_send(chunk: Chunk, route: Route) -> jax.Array:
    num_tokens, width = chunk.hidden_TD.shape
    hidden_TQV = chunk.hidden_TD.reshape(num_tokens, *_row_shape(width))
    return hidden_TQV[jax.lax.div(route.order_N, chunk.slots_TK.shape[1])]


def _nothing_home(chunk: Chunk) -> jax.Array:
    return jax.lax.empty((chunk.slots_TK.size, *_row_shape(chunk.hidden_TD.shape[1])), chunk.hidden_TD.dtype)


def _add_up(chunk: Chunk, route: Route, home_NQV: jax.Array, rule: ExchangeRule) -> jax.Array:
    """Weigh each token's results and add them, first pick first, in float32. What went nowhere has no result."""
    place_TK = inverse(route.order_N).reshape(chunk.slots_TK.shape)
    total_TQV = jnp.zeros((1, 1, 1), jnp.float32)
    for pick in range(chunk.slots_TK.shape[1]):
        sent_T11 = (chunk.slots_TK[:, pick] < rule.num_slots)[:, None, None]
        result_TQV = jnp.where(sent_T11, home_NQV[place_TK[:, pick]].astype(jnp.float32), 0.0)
        total_TQV += chunk.gates_TK[:, pick, None, None] * result_TQV
    return total_TQV.reshape(chunk.hidden_TD.shape).astype(chunk.hidden_TD.dtype)


def _slots_of_round(route: Route, turn: jax.Array | int, rule: ExchangeRule) -> jax.Array:
    """Local slot of each received row [C]; the number of local slots where the round has no row."""
    num_local = rule.num_slots // rule.num_ranks
    place_C = turn * rule.round_rows + jnp.arange(rule.round_rows, dtype=jnp.int32)
    pair_C = jnp.searchsorted(route.ends_X, place_C, side="right", method="compare_all")
    return jnp.where(pair_C < route.ends_X.size, jax.lax.rem(pair_C, num_local), num_local)


def _dispatch(rows_NQV: jax.Array, route: Route, turn: jax.Array | int, rule: ExchangeRule) -> jax.Array:
    """Send this round's rows; returns what arrives [C, Q, V]."""
    me = jax.lax.axis_index(rule.axes)
    at_sender_RR, at_receiver_RR, sizes_RR = _places(route, turn, rule)
    slices = RaggedSlices(at_sender_RR[me], sizes_RR[me], at_receiver_RR[me], sizes_RR[:, me])
    empty_CQV = jax.lax.empty((rule.round_rows, *rows_NQV.shape[1:]), rows_NQV.dtype)
    return ragged_all_to_all(rows_NQV, empty_CQV, slices, axis_name=rule.axes)


def _bring_home(
    results_CQV: jax.Array, home_NQV: jax.Array, route: Route, turn: jax.Array | int, rule: ExchangeRule
) -> jax.Array:
    """Send this round's results back to where their rows came from; returns `home_NQV` with them written in."""
    me = jax.lax.axis_index(rule.axes)
    at_sender_RR, at_receiver_RR, sizes_RR = _places(route, turn, rule)
    slices = RaggedSlices(at_receiver_RR[:, me], sizes_RR[:, me], at_sender_RR[:, me], sizes_RR[me])
    return ragged_all_to_all(results_CQV, home_NQV, slices, axis_name=rule.axes)


def _places(route: Route, turn: jax.Array | int, rule: ExchangeRule) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of this round's rows from each rank to each rank: where they begin at the sender, at the receiver, how many."""
    begin = turn * rule.round_rows - route.at_receiver_RR
    low_RR = jnp.clip(begin, 0, route.sent_RR)
    sizes_RR = jnp.clip(begin + rule.round_rows, 0, route.sent_RR) - low_RR
    some_RR = sizes_RR > 0
    return jnp.where(some_RR, route.at_sender_RR + low_RR, 0), jnp.where(some_RR, low_RR - begin, 0), sizes_RR
