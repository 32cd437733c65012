"""Expert parallelism in one TPU kernel: rows are pushed to their slots' devices, multiplied, and pushed back.

    share counts | place rows | for each local slot: [ push rows of a later slot, multiply, push results back ] | add up

While a slot is multiplied the weights of the next one that has rows are read, and rows and results of others are on
their way. Nothing but weights is read from HBM: rows, wherever they are, lie in the core's memory. It can hold all rows
of all ranks, so none is ever left out, and that is why this is for few tokens: what a decode step has. Weights of int8
are read as such, converted on their way into the matrix unit, and products multiplied by the scales of their columns.
"""

# T tokens   D model width   F expert width   K experts per token   N assignments = T * K   R ranks   S local slots
# P slots of all ranks   X layers * S   M rows of a tile   C tokens that are converted at once

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.expert_products import ACTIVATIONS, LayerExperts
from rayserve_moe.kernels.pushed_places import count_slots, places_of, table_rows
from rayserve_moe.kernels.pushed_rows import (
    as_words,
    device_of,
    halves,
    meet,
    my_rank,
    push_slot,
    return_slot,
    wait_for,
)
from rayserve_moe.kernels.pushed_sizes import (
    CONVERTED_TOKENS,
    LANES,
    SUBLANES,
    TILE_ROWS,
    PushSizes,
    Refs,
    lacks,
    scratch_of,
)

COLLECTIVE_ID = 1
"""Of the barrier that this kernel's ranks meet at."""
AHEAD = 4
"""Slots whose rows are pushed before they are wanted: ranks skip slots without rows, so some are ahead of others."""


def push_experts(
    hidden_TD: jax.Array,
    slots_TK: jax.Array,
    gates_TK: jax.Array,
    experts: LayerExperts,
    *,
    sizes: PushSizes,
    interpret: Any = False,
) -> jax.Array:
    """The sum of gate * expert over the assignments of each token, in router order: bfloat16 [T, D].

    Call it inside a sharded function over `sizes.axes`, on every rank. Slots are counted over all ranks, of which each
    has `sizes.num_slots` one after the other; beyond them is an assignment that goes nowhere. `interpret` (see
    `pallas_call`) runs the kernel where there is no TPU. AssertionError where the kernel `lacks` something for it.
    """
    reason = lacks(sizes, interpret=bool(interpret))
    assert not reason, reason
    weights, num_slots = experts.weights, sizes.num_ranks * sizes.num_slots
    missing = sizes.counted_tokens - sizes.num_tokens
    slots_TK = jnp.where(slots_TK < num_slots, slots_TK, -1)
    slots_TK = jnp.pad(slots_TK, ((0, missing), (0, 0)), constant_values=-1)
    first_1 = jnp.asarray(experts.first_slot, jnp.int32).reshape(1)
    run = _kernel_for(sizes, interpret=interpret)
    gates_N = gates_TK.reshape(-1)
    return run(first_1, gates_N, hidden_TD, slots_TK, tuple(array for array in weights if array is not None))


def _kernel_for(sizes: PushSizes, *, interpret: Any) -> Callable[..., jax.Array]:
    smem, vmem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pltpu.HBM))
    expert = 3 * sizes.width * sizes.inner
    return pl.pallas_call(
        partial(_kernel, sizes=sizes),
        in_specs=[smem, smem, vmem, vmem, (hbm,) * len(sizes.held_weights)],
        out_specs=vmem,
        out_shape=jax.ShapeDtypeStruct((sizes.num_tokens, sizes.width), jnp.bfloat16),
        scratch_shapes=scratch_of(sizes),
        compiler_params=pltpu.CompilerParams(
            collective_id=COLLECTIVE_ID, has_side_effects=True, vmem_limit_bytes=sizes.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * sizes.num_rows * expert,
            bytes_accessed=2 * sizes.num_slots * expert,
            transcendentals=sizes.num_rows * sizes.inner,
        ),
        name="pushed_experts",
        interpret=interpret,
    )


def _kernel(*given: Any, sizes: PushSizes) -> None:
    refs = Refs(*given)
    me = my_rank(sizes)
    _tell_counts(refs, sizes, me)
    _begin_weights(refs, sizes, me)
    _place_rows(refs, sizes)
    ahead = jax.lax.fori_loop(0, min(AHEAD, sizes.num_slots), partial(push_slot, refs, sizes, me), 0)

    def visit(slot: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        turn, pushed, returned = carry
        pushed = push_slot(refs, sizes, me, slot + AHEAD, pushed)
        num_rows = refs.table_s[3 * sizes.num_ranks, me * sizes.num_slots + slot]

        @pl.when(num_rows > 0)
        def _() -> None:
            _multiply_slot(refs, sizes, me, slot, turn)

        returned = return_slot(refs, sizes, me, slot, returned)
        return turn + jnp.where(num_rows > 0, 1, 0), pushed, returned

    zero = jnp.int32(0)
    _, pushed, returned = jax.lax.fori_loop(0, sizes.num_slots, visit, (zero, ahead, zero))
    _add_up(refs, sizes, me)
    wait_for(refs.sent, pushed, refs.moved.at[0], sizes)
    wait_for(refs.here, returned, refs.moved.at[1], sizes)


def _tell_counts(refs: Refs, sizes: PushSizes, me: jax.Array) -> None:
    """Count this rank's assignments by slot, tell the others, and look up from all ranks' counts where rows go."""
    slots_TK = refs.slots_TK[...]
    counts_P = count_slots(slots_TK, sizes.num_lanes)
    refs.counts[me] = jnp.broadcast_to(counts_P, (SUBLANES, sizes.num_lanes))
    refs.places[...] = places_of(slots_TK, counts_P, nowhere=sizes.num_rows)
    places = pltpu.make_async_copy(refs.places, refs.places_s, refs.counted.at[2])
    places.start()
    meet(sizes, me)

    def tell(k: jax.Array, _: None) -> None:
        device = device_of(jax.lax.rem(me + k, sizes.num_ranks), sizes)
        pltpu.make_async_remote_copy(
            refs.counts.at[me],
            refs.counts.at[me],
            refs.counted.at[0],
            refs.counted.at[1],
            device_id=device,
            device_id_type=pl.DeviceIdType.MESH,
        ).start()

    def hear(_: jax.Array, carry: None) -> None:
        for semaphore in (refs.counted.at[0], refs.counted.at[1]):
            pltpu.make_async_copy(refs.counts.at[0], refs.counts.at[0], semaphore).wait()

    jax.lax.fori_loop(1, sizes.num_ranks, tell, None)
    places.wait()
    jax.lax.fori_loop(1, sizes.num_ranks, hear, None)
    rank_counts = [refs.counts[rank][:1] for rank in range(sizes.num_ranks)]
    rows = table_rows(rank_counts, num_local=sizes.num_slots, tile_rows=TILE_ROWS)
    for place, row_P in enumerate(rows):
        refs.table[place : place + 1, :] = row_P
    table = pltpu.make_async_copy(refs.table, refs.table_s, refs.counted.at[2])
    table.start()
    table.wait()


def _begin_weights(refs: Refs, sizes: PushSizes, me: jax.Array) -> None:
    """Find the next slot with rows from each slot on, and begin to read the weights of the first one."""
    refs.next_s[sizes.num_slots] = sizes.num_slots

    def find(k: jax.Array, _: None) -> None:
        slot = sizes.num_slots - 1 - k
        num_rows = refs.table_s[3 * sizes.num_ranks, me * sizes.num_slots + slot]
        refs.next_s[slot] = jnp.where(num_rows > 0, slot, refs.next_s[slot + 1])

    jax.lax.fori_loop(0, sizes.num_slots, find, None)
    _read_weights(refs, sizes, refs.next_s[0], jnp.int32(0))


def _read_weights(refs: Refs, sizes: PushSizes, slot: jax.Array, half: jax.Array) -> None:
    """Begin to read a slot's weights into one of the two halves; there is nothing to read beyond the last slot."""

    @pl.when(slot < sizes.num_slots)
    def _() -> None:
        for copy in _weight_copies(refs, refs.first_1[0] + slot, half):
            copy.start()


def _weight_copies(refs: Refs, index: jax.Array, half: jax.Array) -> list[Any]:
    semaphore = refs.weights_in.at[half]
    pairs = zip(refs.weights_X, refs.weights_H, strict=True)
    return [pltpu.make_async_copy(flat.at[index], held.at[half], semaphore) for flat, held in pairs]


def _place_rows(refs: Refs, sizes: PushSizes) -> None:
    """Turn tokens into words, and copy each one's row to the places of its assignments."""
    words, chunk = sizes.row_words, min(CONVERTED_TOKENS, sizes.num_tokens)

    def convert(i: jax.Array, _: None) -> None:
        first = pl.multiple_of(i * chunk, chunk)
        words_CW = as_words(refs.hidden_TD[pl.ds(first, chunk), :].astype(jnp.float32))
        for q in range(words):
            refs.tokens[pl.ds(first * words + q, chunk, stride=words), :] = words_CW[:, q * LANES : (q + 1) * LANES]

    def place(token: jax.Array, _: None) -> None:
        row = refs.tokens[pl.ds(pl.multiple_of(token * words, words), words), :]
        for k in range(sizes.top_k):
            at = pl.multiple_of(refs.places_s[token, k] * words, words)
            refs.sent[pl.ds(at, words), :] = row

    jax.lax.fori_loop(0, sizes.num_tokens // chunk, convert, None)
    jax.lax.fori_loop(0, sizes.num_tokens, place, None)


def _multiply_slot(refs: Refs, sizes: PushSizes, me: jax.Array, slot: jax.Array, turn: jax.Array) -> None:
    """Multiply the rows of a slot where they lie: results take their places."""
    lane, half = me * sizes.num_slots + slot, jax.lax.rem(turn, 2)
    num_rows, begin = refs.table_s[3 * sizes.num_ranks, lane], refs.table_s[3 * sizes.num_ranks + 1, lane]
    for copy in _weight_copies(refs, refs.first_1[0] + slot, half):
        copy.wait()
    _read_weights(refs, sizes, refs.next_s[slot + 1], 1 - half)
    wait_for(refs.here, num_rows, refs.arrived_S.at[slot], sizes)

    def tile(i: jax.Array, _: None) -> None:
        _multiply_tile(refs, sizes, begin + i * TILE_ROWS, half)

    jax.lax.fori_loop(0, pl.cdiv(num_rows, TILE_ROWS), tile, None)


def _multiply_tile(refs: Refs, sizes: PushSizes, first: jax.Array, half: jax.Array) -> None:
    words, f32 = sizes.row_words, jnp.float32
    pieces = [pl.ds(first * words + q, TILE_ROWS, stride=words) for q in range(words)]
    parts = [halves(refs.here[piece, :]) for piece in pieces]
    columns = [lower for lower, _ in parts] + [upper for _, upper in parts]
    rows_MD = jnp.concatenate([column.astype(jnp.bfloat16) for column in columns], axis=1)
    gate_MF, up_MF = (_product(rows_MD, refs, place, half) for place in (0, 1))
    inner_MF = ACTIVATIONS[sizes.activation](gate_MF, up_MF).astype(jnp.bfloat16)
    result_MD = _product(inner_MF, refs, 2, half)
    words_MW = as_words(result_MD.astype(jnp.bfloat16).astype(f32))
    for q, piece in enumerate(pieces):
        refs.here[piece, :] = words_MW[:, q * LANES : (q + 1) * LANES]


def _product(rows_MK: jax.Array, refs: Refs, place: int, half: jax.Array) -> jax.Array:
    """Rows times a matrix that is held, and times the scales of its columns if any: float32."""
    matrix_KN = refs.weights_H[place][half].astype(rows_MK.dtype)
    sum_MN = jnp.dot(rows_MK, matrix_KN, preferred_element_type=jnp.float32)
    return sum_MN * refs.weights_H[place + 3][half] if len(refs.weights_H) > 3 else sum_MN


def _add_up(refs: Refs, sizes: PushSizes, me: jax.Array) -> None:
    """Wait for all results, weigh those of each token and add them in router order, in float32."""
    words, last, chunk = sizes.row_words, sizes.num_lanes - 1, min(CONVERTED_TOKENS, sizes.num_tokens)
    # Assignments that went nowhere have the place behind all others.
    refs.home[pl.ds(sizes.num_rows * words, words), :] = jnp.zeros((words, LANES), jnp.uint32)
    num_results = refs.table_s[2 * sizes.num_ranks + me, last] + refs.table_s[me, last]
    wait_for(refs.home, num_results, refs.moved.at[2], sizes)

    def add(token: jax.Array, _: None) -> None:
        lower, upper = jnp.zeros((words, LANES), jnp.float32), jnp.zeros((words, LANES), jnp.float32)
        for k in range(sizes.top_k):
            at = pl.multiple_of(refs.places_s[token, k] * words, words)
            result = halves(refs.home[pl.ds(at, words), :])
            gate = refs.gates_N[token * sizes.top_k + k]
            lower, upper = lower + gate * result[0], upper + gate * result[1]
        both = jnp.concatenate([lower, upper], axis=1).astype(jnp.bfloat16).astype(jnp.float32)
        refs.tokens[pl.ds(pl.multiple_of(token * words, words), words), :] = as_words(both)

    def convert(i: jax.Array, _: None) -> None:
        first = pl.multiple_of(i * chunk, chunk)
        parts = [halves(refs.tokens[pl.ds(first * words + q, chunk, stride=words), :]) for q in range(words)]
        columns = [lower for lower, _ in parts] + [upper for _, upper in parts]
        rows_CD = jnp.concatenate(columns, axis=1).astype(jnp.bfloat16)
        refs.out_TD[pl.ds(first, chunk), :] = rows_CD

    jax.lax.fori_loop(0, sizes.num_tokens, add, None)
    jax.lax.fori_loop(0, sizes.num_tokens // chunk, convert, None)
