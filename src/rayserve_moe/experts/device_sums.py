"""Expert parallelism with a row for each token and device: a device adds up its experts before the row returns.

A token with several experts on a device goes there once, and comes back once. Chunks are exchanged one after another:
while the experts of a chunk are multiplied, rows of the next chunk go out and sums of the previous chunk come back.

A sender has its rows in the order of ranks, then tokens, and its assignments in the order of slots. All ranks gather
these lists of all chunks at once, and the numbers of rows. A rank receives at most a row for each token of all ranks,
and buffers hold as many. So a chunk takes a single round, however uneven the load.

    sender's rows    [ to rank 0 | to rank 1 | ... | unused ]
    receiver's rows  [ from rank 0 | from rank 1 | ... | unused ]

The bits of a sum depend on the devices of its experts. This backend is therefore for experts that stay in the slots of
their own numbers: a token's experts are added up in their order, device after device.
"""

# G chunks   T tokens of a chunk   K experts per token   R ranks   N rows = R * T   A assignments of a sender = T * K
# S local slots   P slots of all ranks   D model width = Q * V, V lanes   Y numbers that a rank shares

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.experts.addition_order import max_tokens, unsupported_kind
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.rank_rows import Runs, runs_between
from rayserve_moe.experts.slot_mapping import PlacedExperts
from rayserve_moe.experts.tokens import MIN_FUSED_CHUNK, RoutedTokens, cut_into_chunks, take_part
from rayserve_moe.kernels.ragged_exchange import RaggedSlices, ragged_all_to_all
from rayserve_moe.kernels.reference.device_sums import DeviceSumKernels, SlotLists
from rayserve_moe.kernels.reference.expert_products import LayerExperts
from rayserve_moe.parallel.sharding import DATA, TENSOR

LANES = 128
TOGETHER = 16
"""Divides the tokens of a chunk: rows of a tile of bfloat16 on a TPU."""


class RowPlan(NamedTuple):
    """The way of the rows of a chunk, or of all chunks [G, ...]."""

    token_N: jax.Array
    """Token of each row to send."""
    places_RT: jax.Array
    """Row of each token for each rank; N without a row."""
    sent: Runs
    """Runs that this rank sends."""
    received: Runs
    """Runs that this rank receives."""
    lists: SlotLists
    """The assignments to the slots of this rank."""


class Chunk(NamedTuple):
    """Tokens of a chunk, or of all chunks [G, ...], and the way of their rows."""

    hidden_TD: jax.Array
    plan: RowPlan


def apply_device_sums(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> jax.Array:
    """Return the MoE sum of each token [T, D], for calls that `unsupported_reason` accepts."""
    plan, (num_tokens, width) = config.plan, tokens.hidden_TD.shape
    part = take_part(tokens, plan.tensor_rank(), num_parts=plan.tensor_size)
    chunk = chunk_tokens(len(part.valid_T), max_tokens(experts, config))
    hidden_GTD, ids_GTK, gates_GTK, valid_GT, _ = cut_into_chunks(part, chunk)
    with jax.named_scope("dispatch"):
        slots_GTK = jnp.where(valid_GT[..., None], ids_GTK, config.num_slots)
        row_plans = plan_rows(slots_GTK, gates_GTK, config=config)
    mean_rows = chunk * config.router.top_k * plan.num_expert_ranks / config.num_slots
    exchange = ChunkExchange(config.kernels.experts.device_sums.run, experts.of_layer(config.product(mean_rows)))
    out_GTD = exchange.run(Chunk(hidden_GTD, row_plans))
    out_TD = out_GTD.reshape(-1, width)[: len(part.valid_T)]
    if plan.tensor_size > 1:
        with jax.named_scope("combine"):
            out_TD = jax.lax.all_gather(out_TD, TENSOR, axis=0, tiled=True)
    return out_TD[:num_tokens]


def unsupported_reason(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> str:
    """Return why `apply_device_sums` does not take a call, or would be slow; empty if it does."""
    plan = config.plan
    if reason := unsupported_here(tokens, experts, config=config):
        return reason
    per_device, most = -(-len(tokens.hidden_TD) // plan.tensor_size), max_tokens(experts, config)
    if per_device < 2 * MIN_FUSED_CHUNK:
        return f"{per_device} tokens of a device are fewer than two chunks of {MIN_FUSED_CHUNK}"
    if most < MIN_FUSED_CHUNK:
        return f"a chunk has at most {most} tokens of a device, not {MIN_FUSED_CHUNK}"
    return ""


def unsupported_here(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> str:
    """Return why `apply_device_sums` cannot take a call; empty if it can.

    A backend that takes a call in its place because of adapters adds up in the same order.
    """
    if experts.adapters is not None:
        return "tokens have adapters of experts"
    return unsupported_kind(tokens, experts, config=config)


def chunk_tokens(num_tokens: int, max_tokens: int) -> int:
    """Return the tokens of a chunk: at most `max_tokens`, and several chunks unless they are small."""
    most = max(TOGETHER, max_tokens // TOGETHER * TOGETHER)
    num_chunks = -(-num_tokens // most)
    if num_tokens >= 2 * MIN_FUSED_CHUNK:
        num_chunks = max(2, num_chunks)
    return -(-num_tokens // (num_chunks * TOGETHER)) * TOGETHER


def plan_rows(slots_GTK: jax.Array, gates_GTK: jax.Array, *, config: ExpertConfig) -> RowPlan:
    """Place the rows and list the assignments of all chunks, and gather the lists of all ranks."""
    num_ranks, num_local = config.plan.num_expert_ranks, config.num_local_slots
    axes, (num_chunks, num_tokens, _) = (DATA, TENSOR), slots_GTK.shape
    num_rows = num_ranks * num_tokens
    token_T, rank_R = np.arange(num_tokens, dtype=np.int32), np.arange(num_ranks, dtype=np.int32)
    is_for_GTKR = jax.lax.div(slots_GTK, num_local)[..., None] == rank_R
    is_sent_GTR = jnp.any(is_for_GTKR, axis=2)
    # Zeros and ones are exact in any product.
    is_before_TT = (token_T < token_T[:, None]).astype(np.float32)
    before_GTR = jnp.einsum("ut,gtr->gur", is_before_TT, is_sent_GTR.astype(jnp.float32)).astype(jnp.int32)
    counts_GR = jnp.sum(is_sent_GTR, axis=1, dtype=jnp.int32)
    begin_GR = jnp.sum(jnp.where(rank_R < rank_R[:, None], counts_GR[:, None], 0), axis=2)
    places_GTR = jnp.where(is_sent_GTR, begin_GR[:, None] + before_GTR, num_rows)
    number_GTR = jnp.where(is_sent_GTR, rank_R * num_tokens + token_T[:, None], num_rows)
    number_GN = jax.lax.sort(jnp.swapaxes(number_GTR, 1, 2).reshape(num_chunks, num_rows), dimension=1)

    row_GTK = jnp.sum(jnp.where(is_for_GTKR, before_GTR[:, :, None], 0), axis=3)
    order_GTK = slots_GTK * num_tokens + token_T[:, None]
    columns = (order_GTK, row_GTK, jax.lax.bitcast_convert_type(gates_GTK, jnp.int32))
    _, row_GA, gate_GA = jax.lax.sort([array.reshape(num_chunks, -1) for array in columns], dimension=1, num_keys=1)
    slot_Y = np.arange(config.num_slots + 1, dtype=np.int32)
    begin_GP = jnp.sum(slots_GTK.reshape(num_chunks, -1, 1) < slot_Y, axis=1, dtype=jnp.int32)
    own = [row_GA, gate_GA, begin_GP, counts_GR]
    sizes = np.cumsum([array.shape[1] for array in own])
    own_GY = jnp.pad(jnp.concatenate(own, axis=1), ((0, 0), (0, -sizes[-1] % LANES)))
    all_GRY = jnp.swapaxes(jax.lax.all_gather(own_GY, axes), 0, 1)
    places_GRA, gates_GRA, begin_GRP, counts_GRR, _ = jnp.split(all_GRY, sizes, axis=2)
    me = jax.lax.axis_index(axes)
    sent, received = jax.vmap(runs_between, in_axes=(0, None))(counts_GRR, me)
    base_GR = jnp.concatenate([received.at_receiver_R, jnp.sum(received.counts_R, axis=1, keepdims=True)], axis=1)
    lists = SlotLists(
        jax.lax.dynamic_slice_in_dim(begin_GRP, me * num_local, num_local + 1, axis=2),
        base_GR,
        places_GRA,
        jax.lax.bitcast_convert_type(gates_GRA, jnp.float32),
    )
    return RowPlan(jax.lax.rem(number_GN, num_tokens), jnp.swapaxes(places_GTR, 1, 2), sent, received, lists)


@dataclass(frozen=True)
class ChunkExchange:
    """The stages of an exchange of chunks, and their order."""

    kernels: DeviceSumKernels
    experts: LayerExperts
    axes: tuple[str, ...] = (DATA, TENSOR)

    def run(self, chunks: Chunk) -> jax.Array:
        """Return the sums [G, T, D]. Exchanges of neighbouring chunks run while a chunk is multiplied.

        return chunk i - 1, add it up  |  multiply chunk i  |  send chunk i + 1
        """
        num_chunks = len(chunks.hidden_TD)
        if num_chunks == 1:
            chunk = _of(chunks, 0)
            sums = self._multiply(chunk.plan, self._send(chunk))
            return self._add_up(chunk.plan, self._give_back(chunk.plan, sums))[None]

        def visit(carry: tuple[jax.Array, jax.Array], near: tuple[Chunk, Chunk, Chunk]) -> tuple:
            (received, sums), (previous, own, following) = carry, near
            out_TD = self._add_up(previous.plan, self._give_back(previous.plan, sums))
            return (self._send(following), self._multiply(own.plan, received)), out_TD

        first, second, previous, last = (_of(chunks, which) for which in (0, 1, -2, -1))
        begin = self._send(second), self._multiply(first.plan, self._send(first))
        near = _of(chunks, slice(-2)), _of(chunks, slice(1, -1)), _of(chunks, slice(2, None))
        (received, sums), out_GTD = jax.lax.scan(visit, jax.lax.optimization_barrier(begin), near)
        both = self._give_back(previous.plan, sums), self._multiply(last.plan, received)
        returned, sums = jax.lax.optimization_barrier(both)
        out_TD = self._add_up(previous.plan, returned), self._add_up(last.plan, self._give_back(last.plan, sums))
        return jnp.concatenate([out_GTD, jnp.stack(out_TD)])

    @jax.named_scope("dispatch")
    def _send(self, chunk: Chunk) -> jax.Array:
        """Send the rows of a chunk; return the received rows [N, Q, V]."""
        sent, received = chunk.plan.sent, chunk.plan.received
        rows_NQV = self.kernels.place_rows(chunk.hidden_TD, chunk.plan.token_N, jnp.sum(sent.counts_R))
        slices = RaggedSlices(sent.at_sender_R, sent.counts_R, sent.at_receiver_R, received.counts_R)
        return self._exchange(rows_NQV, slices, chunk.plan.token_N.size)

    @jax.named_scope("experts")
    def _multiply(self, plan: RowPlan, rows_NQV: jax.Array) -> jax.Array:
        """Return the sums of the received rows [N, Q, V]."""
        return self.kernels.sum_experts(rows_NQV, plan.lists, self.experts)

    @jax.named_scope("combine")
    def _give_back(self, plan: RowPlan, sums_NQV: jax.Array) -> jax.Array:
        """Return the sums to the senders of their rows: [N, Q, V]."""
        sent, received = plan.sent, plan.received
        slices = RaggedSlices(received.at_receiver_R, received.counts_R, received.at_sender_R, sent.counts_R)
        return self._exchange(sums_NQV, slices, plan.token_N.size)

    @jax.named_scope("combine")
    def _add_up(self, plan: RowPlan, rows_NQV: jax.Array) -> jax.Array:
        """Return the sum of each token [T, D]."""
        return self.kernels.add_rows(rows_NQV, plan.places_RT, jnp.sum(plan.sent.counts_R))

    def _exchange(self, rows_NQV: jax.Array, slices: RaggedSlices, num_rows: int) -> jax.Array:
        empty_NQV = jax.lax.empty((num_rows, *rows_NQV.shape[1:]), rows_NQV.dtype)
        return ragged_all_to_all(rows_NQV, empty_NQV, slices, axis_name=self.axes)


def _of(chunks: Chunk, which: int | slice) -> Chunk:
    return jax.tree.map(lambda array: array[which], chunks)
