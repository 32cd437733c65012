"""Expert parallelism in one TPU kernel: rows are pushed to their slots' devices, multiplied, and pushed back.

    share counts | place rows | for each local slot: [ push rows of a later slot, multiply, push results back ] | add up

While a slot is multiplied the weights of the next one that has rows are read, and rows and results of others are on
their way. Nothing but weights is read from HBM where an expert fits into the core's memory twice: it holds all rows of
all ranks. Of larger ones what comes lies in HBM, and is multiplied in groups (`pushed_products`). No row is ever left
out, and a device's own lie in the core's memory: this is for few tokens, what a decode step has. Weights of 8 bits
are read as such, converted on their way into the matrix unit, and scaled, they or the products (`narrow_weights`).

Where two cores share a device, each has half of its slots, memory and semaphores of its own, and exchanges rows with
the same core of the other devices: each pair of a rank and a core is a rank to the code, of those of its core.
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

from rayserve_moe.kernels.reference.expert_products import LayerExperts
from rayserve_moe.kernels.tpu.pushed_places import count_slots, places_of, slots_of_core, table_rows
from rayserve_moe.kernels.tpu.pushed_products import begin_weights, multiply_slot
from rayserve_moe.kernels.tpu.pushed_rows import (
    as_words,
    device_of,
    halves,
    meet,
    my_rank,
    push_slot,
    return_slot,
    wait_for,
)
from rayserve_moe.kernels.tpu.pushed_sizes import (
    CONVERTED_TOKENS,
    LANES,
    SUBLANES,
    TILE_ROWS,
    PushSizes,
    Refs,
    lacks,
    scratch_of,
    vmem_bytes,
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

    Where cores share the device each one makes such a sum over its slots, and their sums are added up.

    Call it inside a sharded function over `sizes.axes`, on every rank. Slots are counted over all ranks, of which each
    has `sizes.num_slots` one after the other; beyond them is an assignment that goes nowhere. `interpret` (see
    `pallas_call`) runs the kernel where there is no TPU. AssertionError where the kernel `lacks` something for it.
    """
    reason = lacks(sizes, interpret=bool(interpret))
    assert not reason, reason
    first_1 = jnp.asarray(experts.first_slot, jnp.int32).reshape(1)
    run = _kernel_for(sizes, interpret=interpret)
    held = tuple(array for array in experts.weights if array is not None)
    out_UTD, *_ = run(first_1, gates_TK, hidden_TD, slots_TK, held)
    first_TD, *others = (out_UTD[core] for core in range(sizes.num_cores))
    # Additions, which XLA computes with what follows, as it does not a reduction.
    return sum((other_TD.astype(jnp.float32) for other_TD in others), first_TD).astype(first_TD.dtype)


def _kernel_for(sizes: PushSizes, *, interpret: Any) -> Callable[..., list[jax.Array]]:
    smem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.HBM))
    cores, of_core, (num_tokens, width) = sizes.num_cores, sizes.of_core, (sizes.num_tokens, sizes.width)
    tokens, slots = (pl.BlockSpec((num_tokens, size), lambda _: (0, 0)) for size in (width, sizes.top_k))
    expert = 3 * width * sizes.inner
    out_specs = [pl.BlockSpec((None, num_tokens, width), lambda core: (core, 0, 0))]
    out_shape = [jax.ShapeDtypeStruct((cores, num_tokens, width), jnp.bfloat16)]
    if sizes.is_streamed:
        out_specs.append(hbm)
        out_shape.append(jax.ShapeDtypeStruct((cores, of_core.num_received * sizes.row_words, LANES), jnp.uint32))
    return pl.pallas_call(
        partial(_kernel, sizes=sizes),
        grid=(cores,),
        in_specs=[smem, smem, tokens, slots, (hbm,) * len(sizes.held_weights)],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch_of(of_core),
        compiler_params=pltpu.CompilerParams(
            collective_id=COLLECTIVE_ID,
            has_side_effects=True,
            vmem_limit_bytes=vmem_bytes(sizes),
            # Each core has one step, and of the other devices meets the same core alone.
            dimension_semantics=(pltpu.PARALLEL,),
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
    refs, core = Refs(*given), pl.program_id(0)
    refs.own_TK[...] = jnp.full(refs.own_TK.shape, -1, jnp.int32)
    refs.own_TK[pl.ds(0, sizes.num_tokens), :] = slots_of_core(refs.slots_TK[...], core, sizes)
    sizes, me = sizes.of_core, my_rank(sizes)
    refs.first_s[0] = refs.first_1[0] + core * sizes.num_slots
    if sizes.is_streamed:
        refs = refs._replace(here=refs.here.at[core])
    _tell_counts(refs, sizes, me)
    begin_weights(refs, sizes, me)
    _place_rows(refs, sizes)
    ahead = jax.lax.fori_loop(0, min(AHEAD, sizes.num_slots), partial(push_slot, refs, sizes, me), 0)

    def visit(slot: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        turn, pushed, returned = carry
        pushed = push_slot(refs, sizes, me, slot + AHEAD, pushed)
        turn = multiply_slot(refs, sizes, me, slot, turn)
        return turn, pushed, return_slot(refs, sizes, me, slot, returned)

    zero = jnp.int32(0)
    _, pushed, returned = jax.lax.fori_loop(0, sizes.num_slots, visit, (zero, ahead, zero))
    _add_up(refs, sizes, me)
    wait_for(refs.sent, pushed, refs.moved.at[0], sizes)
    wait_for(refs.here, returned, refs.moved.at[1], sizes)


def _tell_counts(refs: Refs, sizes: PushSizes, me: jax.Array) -> None:
    """Count this rank's assignments by slot, tell the others, and look up from all ranks' counts where rows go."""
    slots_TK = refs.own_TK[...]
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
            gate = refs.gates_TK[token, k]
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
