"""Expert parallelism by exchange: tokens travel to the ranks that hold their experts, and results travel back.

The devices of a tensor group see the same tokens; each dispatches its own part of them, and the group shares the sums.

Rows are exchanged by `ragged_all_to_all`: each assignment's row to the rank of its slot, and back. A rank sorts its
assignments by slot; slots lie rank after rank, so rows for a rank are adjacent. All ranks gather how many rows go
from each rank to each slot. These numbers alone determine the place of every row, here and at its receiver:

    sender's rows    [ to rank 0 | to rank 1 | ... | padding ]        in the order of slots
    receiver's rows  [ from rank 0 | from rank 1 | ... ]              cut into rounds of `round_rows`

Results are returned per assignment and are added by the sender, in router order or as `addition_order` says. In small
steps on several slices a token's row goes once to each rank of its slots (`rank_rows`). Rows are exchanged as [Q, V]
lanes, so that a row is contiguous in the memory of a TPU.
"""

# T tokens of a chunk   G chunks   K experts per token   N assignments = T * K   D model width = Q * V, V lanes
# R ranks   P slots of all ranks   S local slots   X (sender, local slot) pairs = R * S   C rows of a round
# M received rows that are copied

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.experts.addition_order import adds_by_device
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.rank_rows import (
    LANES,
    RankRows,
    Runs,
    count_slots,
    gather_adapters,
    part_of_runs,
    plan_rank_rows,
    received_adapters,
    rows_of_round,
    runs_between,
    sends_once,
)
from rayserve_moe.experts.slot_mapping import PlacedExperts, choose_slots, is_near
from rayserve_moe.experts.tokens import RoutedTokens, chunk_tokens, cut_into_chunks, round_rows, take_part
from rayserve_moe.kernels.ragged_exchange import RaggedSlices, ragged_all_to_all
from rayserve_moe.kernels.reference.expert_products import LayerExperts, widened
from rayserve_moe.kernels.slot_order import SortedAssignments, order_by_slot, take
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import DATA, TENSOR

Multiply = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


def apply_all_to_all(
    tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig, overlapped: bool = False
) -> jax.Array:
    """Return the MoE sum of each token [T, D], chunk after chunk.

    `overlapped`: other chunks move while a chunk is multiplied.
    """
    plan, (num_tokens, width), top_k = config.plan, tokens.hidden_TD.shape, config.router.top_k
    part = take_part(tokens, plan.tensor_rank(), num_parts=plan.tensor_size)
    chunk, taken = exchange_sizes(tokens.hidden_TD, config=config, overlapped=overlapped)
    hidden_GTD, ids_GTK, gates_GTK, valid_GT, adapter_GT = cut_into_chunks(part, chunk)

    def choose(ids_TK: jax.Array, valid_T: jax.Array) -> jax.Array:
        rank, layer, near = plan.expert_rank(), experts.layer, is_near(num_tokens, config=config)
        return choose_slots(ids_TK, valid_T, experts.maps, layer=layer, rank=rank, config=config, near=near)

    # Each chunk divides its tokens over an expert's slots by their shares, so that ranks are even in every chunk.
    with jax.named_scope("dispatch"):
        slots_GTK = jax.vmap(choose)(ids_GTK, valid_GT)
    num_ranks, row_bytes = plan.num_expert_ranks, width * tokens.hidden_TD.dtype.itemsize
    exchange = ExchangeConfig(
        (DATA, TENSOR),
        num_ranks,
        config.num_slots,
        taken,
        plan.num_slices,
        adds_by_device(tokens, experts, config),
        not overlapped and sends_once(chunk, row_bytes, config=config),
    )
    mean_rows = chunk * top_k * num_ranks / config.router.num_experts
    of_layer = experts.of_layer(config.product(mean_rows), part.adapter_T)
    if len(hidden_GTD) > 1 and platform_of(plan.mesh) == "tpu":  # otherwise every chunk would convert them
        of_layer = widened(of_layer, tokens.hidden_TD.dtype)
    multiply = multiply_rows(of_layer, kernel=config.kernels.experts.results)
    run, chunks = run_overlapped if overlapped else run_in_turn, Chunk(hidden_GTD, slots_GTK, gates_GTK, adapter_GT)
    out_TD = run(chunks, multiply=multiply, config=exchange).reshape(-1, width)[: len(part.valid_T)]
    if plan.tensor_size > 1:
        with jax.named_scope("combine"):
            out_TD = jax.lax.all_gather(out_TD, TENSOR, axis=0, tiled=True)
    return out_TD[:num_tokens]


def exchange_sizes(hidden_TD: jax.Array, *, config: ExpertConfig, overlapped: bool = False) -> tuple[int, int]:
    """Return the tokens of a chunk, and the rows that a rank takes per round."""
    num_tokens, top_k = -(-hidden_TD.shape[0] // config.plan.tensor_size), config.router.top_k
    row_bytes = hidden_TD.shape[1] * hidden_TD.dtype.itemsize
    chunk = chunk_tokens(num_tokens, top_k=top_k, row_bytes=row_bytes, overlapped=overlapped)
    return chunk, round_rows(chunk, top_k=top_k, num_ranks=config.plan.num_expert_ranks)


def multiply_rows(experts: LayerExperts, *, kernel: Callable[..., jax.Array]) -> Multiply:
    """Return the grouped product of rows that belong to a local slot each, by `ExpertKernels.results`."""

    def multiply(rows_CQV: jax.Array, slots_C: jax.Array, adapter_C: jax.Array | None) -> jax.Array:
        with jax.named_scope("experts"):
            return kernel(rows_CQV, slots_C[:, None], experts.with_rows(adapter_C))[:, 0]

    return multiply


@dataclass(frozen=True)
class ExchangeConfig:
    """Fixed sizes of an exchange: mesh axes, ranks over them, slots of all ranks, rows taken per round, slices."""

    axes: tuple[str, ...]
    num_ranks: int
    num_slots: int
    round_rows: int
    num_slices: int = 1
    adds_by_device: bool = False
    """True if a token's results are added up in the order of slots, and rounded for each device (`device_sums`)."""
    sends_once: bool = False
    """True if a token's row goes once to each rank of its slots (`rank_rows`); not for overlapped chunks."""


class Route(NamedTuple):
    """The way of a chunk's rows."""

    order: SortedAssignments
    """Assignments by slot, padding last."""
    sent: Runs
    """Runs of assignments that this rank sends."""
    received: Runs
    """Runs of assignments that this rank receives."""
    ends_X: jax.Array
    """End of the rows of each (sender, local slot) in this rank's receiving order."""
    max_rows: jax.Array
    """Number of rows that the fullest rank multiplies."""
    once: RankRows | None = None
    """The way of rows that go once to each rank; None: a row goes to each slot."""
    adapter_RN: jax.Array | None = None
    """Adapters of all ranks' rows, in the order in which they are sent."""


class Underway(NamedTuple):
    """The first round of a chunk in progress: its route, and its rows: received, then multiplied, then returned."""

    route: Route
    rows_XQV: jax.Array


class Chunk(NamedTuple):
    """Tokens to exchange: hidden states [T, D], slot of each assignment [T, K] over all ranks' slots, gates [T, K].

    Assignments to slots of `num_slots` or beyond are not sent. `adapter_T` is as in `RoutedTokens`.
    """

    hidden_TD: jax.Array
    slots_TK: jax.Array
    gates_TK: jax.Array
    adapter_T: jax.Array | None = None


def run_in_turn(chunks: Chunk, *, multiply: Multiply, config: ExchangeConfig) -> jax.Array:
    """Exchange chunks [G, ...] in sequence; return [G, T, D]."""

    def run(chunk: Chunk) -> jax.Array:
        return exchange_chunk(chunk, multiply=multiply, config=config)

    return jax.lax.map(run, chunks)


def run_overlapped(chunks: Chunk, *, multiply: Multiply, config: ExchangeConfig) -> jax.Array:
    """Exchange chunks [G, ...] while others are multiplied and added up; returns [G, T, D].

        return chunk i - 1, add it up  |  multiply chunk i  |  send chunk i + 1

    The three are independent, so both exchanges can run while the core multiplies and adds up.
    """
    if len(chunks.slots_TK) == 1:
        return run_in_turn(chunks, multiply=multiply, config=config)
    send, add_up = partial(send_chunk, config=config), partial(add_up_chunk, multiply=multiply, config=config)
    multiplied_by = partial(multiply_chunk, multiply=multiply, config=config)
    returned = partial(return_chunk, config=config)

    def visit(carry: list[Underway], chunk: tuple[Chunk, Chunk]) -> tuple[list[Underway], jax.Array]:
        (received, before), (previous, following) = carry, chunk
        out_TD = add_up(previous, returned(previous, before))
        return [send(following), multiplied_by(received)], out_TD

    first, second, previous, last = (_of_chunks(chunks, which) for which in (0, 1, -2, -1))
    carry = jax.lax.optimization_barrier([send(second), multiplied_by(send(first))])
    pairs = _of_chunks(chunks, slice(-2)), _of_chunks(chunks, slice(2, None))
    (received, before), out_GTD = jax.lax.scan(visit, carry, pairs)
    both = jax.lax.optimization_barrier((returned(previous, before), multiplied_by(received)))
    out_TD = add_up(previous, both[0]), add_up(last, returned(last, both[1]))
    return jnp.concatenate([out_GTD, jnp.stack(out_TD)])


def exchange_chunk(chunk: Chunk, *, multiply: Multiply, config: ExchangeConfig) -> jax.Array:
    """Send a chunk's rows, multiply the rows that arrive, return the results and add them up: [T, D].

    `multiply(rows_CQV, slots_C, adapter_C)` returns the results, of the rows' shape. The slot of an empty row is the
    number of local slots; its values are undefined, and its result is not used.
    """
    if _fits_one_round(chunk, config):
        underway = multiply_chunk(send_chunk(chunk, config=config), multiply=multiply, config=config)
        return add_up_chunk(chunk, return_chunk(chunk, underway, config=config), multiply=multiply, config=config)
    route = plan_route(chunk, config=config)
    results_NQV = _rounds(chunk, route, _empty_results(chunk), first=0, multiply=multiply, config=config)
    return _add_up(chunk, route, results_NQV, config)


def send_chunk(chunk: Chunk, *, config: ExchangeConfig) -> Underway:
    """Plan the route and send the first round: the first stage of an exchange."""
    route = plan_route(chunk, config=config)
    return Underway(route, _sender(chunk, route, config)(0))


def multiply_chunk(underway: Underway, *, multiply: Multiply, config: ExchangeConfig) -> Underway:
    """Multiply the rows of the first round: the second stage."""
    route, rows_CQV = underway
    return Underway(route, _multiply_round(rows_CQV, route, 0, multiply=multiply, config=config))


def return_chunk(chunk: Chunk, multiplied: Underway, *, config: ExchangeConfig) -> Underway:
    """Return the results of the first round to their senders: the third stage."""
    route, rows_CQV = multiplied
    return Underway(route, _return_results(rows_CQV, _empty_results(chunk), route, 0, config))


def add_up_chunk(chunk: Chunk, returned: Underway, *, multiply: Multiply, config: ExchangeConfig) -> jax.Array:
    """Run further rounds if a rank is overfull, and add up all results: the last stage. Returns [T, D]."""
    route, results_NQV = returned
    if not _fits_one_round(chunk, config):
        results_NQV = _rounds(chunk, route, results_NQV, first=1, multiply=multiply, config=config)
    return _add_up(chunk, route, results_NQV, config)


@jax.named_scope("dispatch")
def plan_route(chunk: Chunk, *, config: ExchangeConfig) -> Route:
    """Sort the assignments by slot and gather the numbers of rows that every rank sends."""
    slots_TK, num_ranks, num_slots = chunk.slots_TK, config.num_ranks, config.num_slots
    slots_N, num_local = jnp.minimum(slots_TK.reshape(-1), num_slots), num_slots // num_ranks
    me, once = jax.lax.axis_index(config.axes), None
    if config.sends_once:
        padded_N = jnp.pad(slots_N, (0, -slots_N.size % LANES), constant_values=num_slots)
        slots_RN = jax.lax.all_gather(padded_N, config.axes)[:, : slots_N.size]
        once = plan_rank_rows(slots_RN.reshape(num_ranks, *slots_TK.shape), me, num_slots=num_slots)
        counts_RY = count_slots(slots_RN, num_ranks, num_slots)
    else:
        counts_RY = jax.lax.all_gather(count_slots(slots_N, num_ranks, num_slots), config.axes)
    sent_RR = counts_RY[:, num_slots : num_slots + num_ranks]
    mine_RS = jax.lax.dynamic_slice_in_dim(counts_RY, me * num_local, num_local, axis=1)
    pairs_RS = np.arange(num_slots).reshape(num_ranks, num_local)
    order, (sent, received) = order_by_slot(slots_TK, num_slots), runs_between(sent_RR, me)
    return Route(
        order=order,
        sent=sent,
        received=received,
        ends_X=jnp.sum(jnp.where(pairs_RS <= np.arange(num_slots)[:, None, None], mine_RS, 0), axis=(1, 2)),
        max_rows=jnp.max(jnp.sum(sent_RR, axis=0)),
        once=once,
        adapter_RN=gather_adapters(chunk.adapter_T, order, axes=config.axes),
    )


def _fits_one_round(chunk: Chunk, config: ExchangeConfig) -> bool:
    """Return True if one exchange round suffices even when every rank sends all its rows to one rank."""
    return config.num_ranks * chunk.slots_TK.size <= config.round_rows


def _rounds(
    chunk: Chunk, route: Route, results_NQV: jax.Array, *, first: int, multiply: Multiply, config: ExchangeConfig
) -> jax.Array:
    """Run rounds from number `first` on, on every rank as many as the fullest rank needs."""
    receive = _sender(chunk, route, config)

    def round_trip(turn: jax.Array, results_NQV: jax.Array) -> jax.Array:
        rows_CQV = _multiply_round(receive(turn), route, turn, multiply=multiply, config=config)
        return _return_results(rows_CQV, results_NQV, route, turn, config)

    num_rounds = jax.lax.div(route.max_rows + config.round_rows - 1, config.round_rows)
    return jax.lax.fori_loop(first, num_rounds, round_trip, results_NQV)


def _row_shape(width: int) -> tuple[int, int]:
    lanes = LANES if width % LANES == 0 else width
    return width // lanes, lanes


def _sender(chunk: Chunk, route: Route, config: ExchangeConfig) -> Callable[[jax.Array | int], jax.Array]:
    """Return a function of a round that returns its received rows [C, Q, V].

    It sends a round's rows at each call, unless a row goes once to each rank: these are sent here, for all rounds.
    """
    num_tokens, width = chunk.hidden_TD.shape
    hidden_TQV = chunk.hidden_TD.reshape(num_tokens, *_row_shape(width))

    @jax.named_scope("dispatch")
    def send(turn: jax.Array | int) -> jax.Array:
        return _dispatch(take(hidden_TQV, route.order.token_P), route, turn, config)

    once = route.once
    if once is None:
        return send
    with jax.named_scope("dispatch"):
        slices = RaggedSlices(
            once.sent.at_sender_R, once.sent.counts_R, once.sent.at_receiver_R, once.received.counts_R
        )
        empty_MQV = jax.lax.empty((config.num_ranks * num_tokens, *hidden_TQV.shape[1:]), hidden_TQV.dtype)
        received_MQV = ragged_all_to_all(
            take(hidden_TQV, once.token_B), empty_MQV, slices, axis_name=config.axes, num_slices=config.num_slices
        )

    @jax.named_scope("dispatch")
    def copy(turn: jax.Array | int) -> jax.Array:
        return rows_of_round(received_MQV, once, turn, round_rows=config.round_rows)

    return copy


def _empty_results(chunk: Chunk) -> jax.Array:
    return jax.lax.empty((chunk.slots_TK.size, *_row_shape(chunk.hidden_TD.shape[1])), chunk.hidden_TD.dtype)


@jax.named_scope("combine")
def _add_up(chunk: Chunk, route: Route, results_NQV: jax.Array, config: ExchangeConfig) -> jax.Array:
    """Add each token's weighted results in float32, in router order or device by device.

    Assignments that were not sent have no result.
    """
    (num_tokens, top_k), row_shape = chunk.slots_TK.shape, results_NQV.shape[1:]
    slots_TK, gates_TK, place_TK = chunk.slots_TK, chunk.gates_TK, route.order.place_P.reshape(num_tokens, top_k)
    if config.adds_by_device:
        slots_TK, place_TK, gates_TK = jax.lax.sort((slots_TK, place_TK, gates_TK), dimension=1, num_keys=1)
    results_KTQV = take(results_NQV, place_TK.T.reshape(-1)).reshape(top_k, num_tokens, *row_shape)
    device_TK = jax.lax.div(slots_TK, config.num_slots // config.num_ranks)
    total_TQV = own_TQV = jnp.zeros((1, 1, 1), jnp.float32)
    for rank in range(top_k):
        sent_T11 = (slots_TK[:, rank] < config.num_slots)[:, None, None]
        result_TQV = jnp.where(sent_T11, results_KTQV[rank].astype(jnp.float32), 0.0)
        if config.adds_by_device and rank:
            is_first_T11 = (device_TK[:, rank] != device_TK[:, rank - 1])[:, None, None]
            rounded_TQV = _rounded(own_TQV, chunk.hidden_TD.dtype)
            total_TQV = jnp.where(is_first_T11, total_TQV + rounded_TQV, total_TQV)
            own_TQV = jnp.where(is_first_T11, 0.0, own_TQV)
        own_TQV += gates_TK[:, rank, None, None] * result_TQV
    if config.adds_by_device:
        own_TQV = _rounded(own_TQV, chunk.hidden_TD.dtype)
    total_TQV += own_TQV
    # XLA would bring the results of every rank into the order of the sum, instead of the sum alone.
    return jax.lax.optimization_barrier(total_TQV.astype(chunk.hidden_TD.dtype)).reshape(chunk.hidden_TD.shape)


def _rounded(numbers: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return float32 numbers rounded to `dtype`: not by converting to and fro, which compilers leave out."""
    form = jnp.finfo(dtype)
    return jax.lax.reduce_precision(numbers, exponent_bits=form.nexp, mantissa_bits=form.nmant)


def _multiply_round(
    rows_CQV: jax.Array, route: Route, turn: jax.Array | int, *, multiply: Multiply, config: ExchangeConfig
) -> jax.Array:
    """Multiply the received rows of a round; the slot of rows that are not received is the number of local slots."""
    num_local = config.num_slots // config.num_ranks
    place_C = turn * config.round_rows + np.arange(config.round_rows, dtype=np.int32)
    pair_C = jnp.searchsorted(route.ends_X, place_C, side="right", method="compare_all")
    slots_C = jnp.where(pair_C < route.ends_X.size, jax.lax.rem(pair_C, num_local), num_local)
    adapter_C = received_adapters(route.adapter_RN, route.received, place_C=place_C, sender_C=pair_C // num_local)
    return multiply(rows_CQV, slots_C, adapter_C)


def _dispatch(rows_NQV: jax.Array, route: Route, turn: jax.Array | int, config: ExchangeConfig) -> jax.Array:
    """Send this round's rows; return the received rows [C, Q, V]."""
    sent, received = (part_of_runs(runs, turn, round_rows=config.round_rows) for runs in (route.sent, route.received))
    slices = RaggedSlices(sent.at_sender_R, sent.counts_R, sent.at_receiver_R, received.counts_R)
    empty_CQV = jax.lax.empty((config.round_rows, *rows_NQV.shape[1:]), rows_NQV.dtype)
    return ragged_all_to_all(rows_NQV, empty_CQV, slices, axis_name=config.axes, num_slices=config.num_slices)


@jax.named_scope("combine")
def _return_results(
    results_CQV: jax.Array, into_NQV: jax.Array, route: Route, turn: jax.Array | int, config: ExchangeConfig
) -> jax.Array:
    """Send this round's results back to the senders of the rows; return `into_NQV` with received results."""
    sent, received = (part_of_runs(runs, turn, round_rows=config.round_rows) for runs in (route.sent, route.received))
    slices = RaggedSlices(received.at_receiver_R, received.counts_R, received.at_sender_R, sent.counts_R)
    return ragged_all_to_all(results_CQV, into_NQV, slices, axis_name=config.axes, num_slices=config.num_slices)


def _of_chunks(chunks: Chunk, which: int | slice) -> Chunk:
    return jax.tree.map(lambda array: array[which], chunks)
