"""Expert parallelism in one TPU kernel: rows are sent to the devices of their slots, multiplied, and sent back.

    share counts | place rows | for each local slot: [ send rows of a later slot, multiply, send results back ] | add up

While ranks share counts, a core reads weights of its first slot, which usually has rows. While it multiplies a slot, it
reads the weights of the next slot with rows, and copies rows and results of other slots. An expert that fits into
the core's memory twice is read whole, and its rows are multiplied in place: only weights are read from HBM, because the
core holds all rows of all ranks. A larger expert is read in blocks of its width, and the products of all blocks are
added up. Its rows wait in HBM and are multiplied in groups; the weights are read once for each group:

    | block 0 | block 1 | block 2 |  of group 0, then of group 1 or of the next slot; while a block is multiplied
              | block 1 | block 2 | block 0 |                                       the next block is read

No row is ever left out, and a device's own rows lie in the core's memory: the kernel is for few tokens, as in a decode
step. Weights of 8 bits are converted on their way into the matrix unit, and scaled before or after the product; or
rows are rounded to 8 bits, and both multiplied as they are (`narrow_weights`).

If two cores share a device, each has half of its slots, and its own memory and semaphores. It exchanges rows with the
same core of the other devices. The code counts pairs of a rank and a core as ranks, among the pairs of the same core.
"""

# T tokens   D model width   F expert width   B block of F   K experts per token   N assignments = T * K   R ranks, and
# rows of a group   S local slots   P slots of all ranks   X layers * S   M rows of a tile   C tokens converted at once

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.narrow_weights import SCALE_BLOCK, held_product, operand_of
from rayserve_moe.kernels.reference.activations import activate
from rayserve_moe.kernels.reference.expert_products import LayerExperts
from rayserve_moe.kernels.tpu.dispatch_rows import (
    arrive,
    as_words,
    count_slots,
    device_of,
    halves,
    in_slot_order,
    meet,
    my_rank,
    places_of,
    return_slot,
    rounded,
    rows_at,
    send_slot,
    slots_of_core,
    table_rows,
    wait_for,
)
from rayserve_moe.kernels.tpu.dispatch_sizes import (
    CONVERTED_TOKENS,
    GROUP_ROWS,
    LANES,
    SUBLANES,
    TILE_ROWS,
    DispatchSizes,
    Refs,
    refs_of,
    scratch_of,
    unsupported_reason,
    vmem_bytes,
)
from rayserve_moe.kernels.tpu.dispatch_weights import (
    begin_weights,
    early_arrays,
    next_weights,
    read_first_weights,
)

COLLECTIVE_ID = 1
"""Identifies the barrier of the kernel's ranks."""
AHEAD = 4
"""Number of slots whose rows are sent ahead: ranks skip slots without rows, so some ranks are ahead of others."""


def dispatch_experts(
    hidden_TD: jax.Array,
    slots_TK: jax.Array,
    gates_TK: jax.Array,
    experts: LayerExperts,
    *,
    sizes: DispatchSizes,
    interpret: Any = False,
) -> jax.Array:
    """Return the sum of gate * expert over the assignments of each token, in router order: bfloat16 [T, D].

    If cores share the device, each computes such a sum over its slots, and their sums are added up.

    Call it inside a sharded function over `sizes.axes`, on every rank. Slots are counted over all ranks, and each
    has `sizes.num_slots` adjacent slots; an assignment beyond all slots is not sent. `interpret` (see
    `pallas_call`) runs the kernel without a TPU. AssertionError for sizes with an `unsupported_reason`.
    """
    reason = unsupported_reason(sizes, interpret=interpret)
    assert not reason, reason
    first_1 = jnp.asarray(experts.first_slot, jnp.int32).reshape(1)
    run = _kernel_for(sizes, interpret=interpret)
    held = tuple(array for array in experts.weights if array is not None)
    out_UTD, *_ = run(first_1, gates_TK, hidden_TD, slots_TK, held)
    first_TD, *others = (out_UTD[core] for core in range(sizes.num_cores))
    # Additions, which XLA computes with what follows, as it does not a reduction.
    return sum((other_TD.astype(jnp.float32) for other_TD in others), first_TD).astype(first_TD.dtype)


def _kernel_for(sizes: DispatchSizes, *, interpret: Any) -> Callable[..., list[jax.Array]]:
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
        name="low_latency_dispatch",
        interpret=interpret,
    )


def _kernel(*given: Any, sizes: DispatchSizes) -> None:
    refs, core = refs_of(*given), pl.program_id(0)
    of_core, me = sizes.of_core, my_rank(sizes)
    refs.tables.first_s[0] = refs.operands.first_1[0] + core * of_core.num_slots
    num_early = early_arrays(sizes)
    begin_weights(refs, of_core, num_early)
    arrive(of_core, me)
    refs.tables.own_TK[...] = jnp.full(refs.tables.own_TK.shape, -1, jnp.int32)
    refs.tables.own_TK[pl.ds(0, sizes.num_tokens), :] = slots_of_core(refs.operands.slots_TK[...], core, sizes)
    sizes = of_core
    if sizes.is_streamed:
        refs = refs._replace(rows=refs.rows._replace(here=refs.rows.here.at[core]))
    _tell_counts(refs, sizes, me)
    read_first_weights(refs, sizes, me, num_early)
    _place_rows(refs, sizes)
    ahead = jax.lax.fori_loop(0, min(AHEAD, sizes.num_slots), partial(send_slot, refs, sizes, me), 0)

    def visit(slot: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        turn, num_sent, returned = carry
        num_sent = send_slot(refs, sizes, me, slot + AHEAD, num_sent)
        turn = multiply_slot(refs, sizes, me, slot, turn)
        return turn, num_sent, return_slot(refs, sizes, me, slot, returned)

    zero = jnp.int32(0)
    _, num_sent, returned = jax.lax.fori_loop(0, sizes.num_slots, visit, (zero, ahead, zero))
    _add_up(refs, sizes, me)
    wait_for(refs.rows.sent, num_sent, refs.semaphores.moved.at[0], sizes)
    wait_for(refs.rows.here, returned, refs.semaphores.moved.at[1], sizes)


def _tell_counts(refs: Refs, sizes: DispatchSizes, me: jax.Array) -> None:
    """Count this rank's assignments by slot, tell the others, and find the targets of rows by all ranks' counts."""
    slots_TK = refs.tables.own_TK[...]
    counts_P = count_slots(slots_TK, sizes.num_lanes)
    refs.tables.counts[me] = jnp.broadcast_to(counts_P, (SUBLANES, sizes.num_lanes))
    places_TL = places_of(slots_TK, counts_P, nowhere=sizes.num_rows)
    if sizes.adds_by_device:
        places_TL = in_slot_order(slots_TK, places_TL, num_local=sizes.num_slots)
    refs.tables.places[...] = places_TL
    places = pltpu.make_async_copy(refs.tables.places, refs.tables.places_s, refs.semaphores.counted.at[2])
    places.start()
    meet(sizes)

    def tell(k: jax.Array, _: None) -> None:
        device = device_of(jax.lax.rem(me + k, sizes.num_ranks), sizes)
        pltpu.make_async_remote_copy(
            refs.tables.counts.at[me],
            refs.tables.counts.at[me],
            refs.semaphores.counted.at[0],
            refs.semaphores.counted.at[1],
            device_id=device,
            device_id_type=pl.DeviceIdType.MESH,
        ).start()

    def hear(_: jax.Array, carry: None) -> None:
        for semaphore in (refs.semaphores.counted.at[0], refs.semaphores.counted.at[1]):
            pltpu.make_async_copy(refs.tables.counts.at[0], refs.tables.counts.at[0], semaphore).wait()

    jax.lax.fori_loop(1, sizes.num_ranks, tell, None)
    places.wait()
    jax.lax.fori_loop(1, sizes.num_ranks, hear, None)
    rank_counts = [refs.tables.counts[rank][:1] for rank in range(sizes.num_ranks)]
    rows = table_rows(rank_counts, num_local=sizes.num_slots, tile_rows=TILE_ROWS)
    for place, row_P in enumerate(rows):
        refs.tables.table[place : place + 1, :] = row_P
    table = pltpu.make_async_copy(refs.tables.table, refs.tables.table_s, refs.semaphores.counted.at[2])
    table.start()
    table.wait()


def _place_rows(refs: Refs, sizes: DispatchSizes) -> None:
    """Turn tokens into words, and copy each token's row to the places of its assignments."""
    words, chunk = sizes.row_words, min(CONVERTED_TOKENS, sizes.num_tokens)

    def convert(i: jax.Array, _: None) -> None:
        first = pl.multiple_of(i * chunk, chunk)
        words_CW = as_words(refs.operands.hidden_TD[pl.ds(first, chunk), :].astype(jnp.float32))
        for q in range(words):
            piece = pl.ds(first * words + q, chunk, stride=words)
            refs.rows.tokens[piece, :] = words_CW[:, q * LANES : (q + 1) * LANES]

    def place(token: jax.Array, _: None) -> None:
        row = refs.rows.tokens[pl.ds(pl.multiple_of(token * words, words), words), :]
        for k in range(sizes.top_k):
            at = pl.multiple_of(refs.tables.places_s[token, k] * words, words)
            refs.rows.sent[pl.ds(at, words), :] = row

    jax.lax.fori_loop(0, sizes.num_tokens // chunk, convert, None)
    jax.lax.fori_loop(0, sizes.num_tokens, place, None)


def _add_up(refs: Refs, sizes: DispatchSizes, me: jax.Array) -> None:
    """Wait for all results, and add each token's weighted results in float32: in router order, or device by device."""
    words, last, chunk = sizes.row_words, sizes.num_lanes - 1, min(CONVERTED_TOKENS, sizes.num_tokens)
    # Assignments that went nowhere have the place behind all others.
    refs.rows.home[pl.ds(sizes.num_rows * words, words), :] = jnp.zeros((words, LANES), jnp.uint32)
    num_results = refs.tables.table_s[2 * sizes.num_ranks + me, last] + refs.tables.table_s[me, last]
    wait_for(refs.rows.home, num_results, refs.semaphores.moved.at[2], sizes)

    def add(token: jax.Array, _: None) -> None:
        lower, upper = (_sum_by_device if sizes.adds_by_device else _sum_by_router)(refs, sizes, token)
        both = rounded(jnp.concatenate([lower, upper], axis=1))
        refs.rows.tokens[pl.ds(pl.multiple_of(token * words, words), words), :] = as_words(both)

    def convert(i: jax.Array, _: None) -> None:
        first = pl.multiple_of(i * chunk, chunk)
        parts = [halves(refs.rows.tokens[pl.ds(first * words + q, chunk, stride=words), :]) for q in range(words)]
        columns = [lower for lower, _ in parts] + [upper for _, upper in parts]
        rows_CD = jnp.concatenate(columns, axis=1).astype(jnp.bfloat16)
        refs.operands.out_TD[pl.ds(first, chunk), :] = rows_CD

    jax.lax.fori_loop(0, sizes.num_tokens, add, None)
    jax.lax.fori_loop(0, sizes.num_tokens // chunk, convert, None)


def _result(refs: Refs, sizes: DispatchSizes, token: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the lower and the upper half of the result at a token's place number `k`."""
    at = pl.multiple_of(refs.tables.places_s[token, k] * sizes.row_words, sizes.row_words)
    return halves(refs.rows.home[pl.ds(at, sizes.row_words), :])


def _sum_by_router(refs: Refs, sizes: DispatchSizes, token: jax.Array) -> list[jax.Array]:
    """Return both halves of the sum of a token's weighted results in router order."""
    total = [jnp.zeros((sizes.row_words, LANES), jnp.float32)] * 2
    for k in range(sizes.top_k):
        gate, result = refs.operands.gates_TK[token, k], _result(refs, sizes, token, k)
        total = [before + gate * half for before, half in zip(total, result, strict=True)]
    return total


def _sum_by_device(refs: Refs, sizes: DispatchSizes, token: jax.Array) -> list[jax.Array]:
    """Return both halves of the sum of a token's weighted results: in the order of slots, rounded for each device."""
    places_s, top_k = refs.tables.places_s, sizes.top_k
    total = own = [jnp.zeros((sizes.row_words, LANES), jnp.float32)] * 2
    for k in range(top_k):
        gate, result = refs.operands.gates_TK[token, places_s[token, top_k + k]], _result(refs, sizes, token, k)
        is_first = places_s[token, 2 * top_k + k] == 1
        total = [before + jnp.where(is_first, rounded(sums), 0.0) for before, sums in zip(total, own, strict=True)]
        own = [jnp.where(is_first, 0.0, sums) + gate * half for sums, half in zip(own, result, strict=True)]
    return [before + rounded(sums) for before, sums in zip(total, own, strict=True)]


def multiply_slot(refs: Refs, sizes: DispatchSizes, me: jax.Array, slot: jax.Array, turn: jax.Array) -> jax.Array:
    """Multiply the rows of a slot: results take their places. Counts on how many blocks of weights were used."""
    lane = me * sizes.num_slots + slot
    num_rows, begin = (refs.tables.table_s[3 * sizes.num_ranks + row, lane] for row in (0, 1))
    if not sizes.is_streamed:

        @pl.when(num_rows > 0)
        def _() -> None:
            half = next_weights(refs, sizes, slot, jnp.int32(0), refs.tables.next_s[slot + 1], turn=turn)
            wait_for(refs.rows.here, num_rows, refs.semaphores.arrived_S.at[slot], sizes)
            _for_tiles(num_rows, lambda i: _multiply_tile(refs, sizes, begin + i * TILE_ROWS, half))

        return turn + jnp.where(num_rows > 0, 1, 0)
    num_steps = pl.cdiv(num_rows, GROUP_ROWS) * sizes.num_blocks

    def multiply_block(step: jax.Array, turn: jax.Array) -> jax.Array:
        group, block = jax.lax.div(step, sizes.num_blocks), jax.lax.rem(step, sizes.num_blocks)
        number = jnp.minimum(num_rows - group * GROUP_ROWS, GROUP_ROWS)
        waiting = rows_at(refs.rows.here, begin + group * GROUP_ROWS, number, sizes)
        held = rows_at(refs.rows.held, jnp.int32(0), number, sizes)
        after = jnp.where(step == num_steps - 1, refs.tables.next_s[slot + 1], slot)
        half = next_weights(refs, sizes, slot, block, after, turn=turn)
        wait_for(refs.rows.here, jnp.where(step == 0, num_rows, 0), refs.semaphores.arrived_S.at[slot], sizes)
        pl.when(block == 0)(partial(_copy, waiting, held, refs))
        _for_tiles(number, lambda i: _multiply_tile(refs, sizes, i * TILE_ROWS, half, block))
        pl.when(block == sizes.num_blocks - 1)(partial(_copy, held, waiting, refs))
        return turn + 1

    return jax.lax.fori_loop(0, num_steps, multiply_block, turn)


def _copy(rows: Any, to: Any, refs: Refs) -> None:
    copy = pltpu.make_async_copy(rows, to, refs.semaphores.counted.at[2])
    copy.start()
    copy.wait()


def _for_tiles(num_rows: jax.Array, run: Any) -> None:
    jax.lax.fori_loop(0, pl.cdiv(num_rows, TILE_ROWS), lambda i, _: run(i), None)


def _multiply_tile(
    refs: Refs, sizes: DispatchSizes, first: jax.Array, half: jax.Array, block: jax.Array | None = None
) -> None:
    """Multiply the rows of a tile by the weights of a half: a whole expert, or a block of it.

    After the last block the sums of all blocks replace the rows.
    """
    words, rows = sizes.row_words, refs.rows.here if block is None else refs.rows.held
    pieces = [pl.ds(first * words + q, TILE_ROWS, stride=words) for q in range(words)]
    parts = [halves(rows[piece, :]) for piece in pieces]
    columns = [lower for lower, _ in parts] + [upper for _, upper in parts]
    rows_MD = jnp.concatenate([column.astype(jnp.bfloat16) for column in columns], axis=1)
    operand_of_rows = partial(operand_of, narrows_rows=sizes.narrows_rows)
    operand = operand_of_rows(rows_MD)
    gate_MB, up_MB = (_product(operand, refs, place, half) for place in (0, 1))
    inner_MB = activate(gate_MB, up_MB, sizes.activation).astype(jnp.bfloat16)
    result_MD = _product(operand_of_rows(inner_MB), refs, 2, half, block)

    def place(result_MD: jax.Array) -> None:
        words_MW = as_words(result_MD.astype(jnp.bfloat16).astype(jnp.float32))
        for q, piece in enumerate(pieces):
            rows[piece, :] = words_MW[:, q * LANES : (q + 1) * LANES]

    if block is None:
        place(result_MD)
        return
    tile = pl.ds(pl.multiple_of(first, TILE_ROWS), TILE_ROWS)
    sums_MD = jnp.where(block == 0, 0.0, refs.rows.sums_RD[tile, :]) + result_MD
    refs.rows.sums_RD[tile, :] = sums_MD
    pl.when(block == sizes.num_blocks - 1)(partial(place, sums_MD))


def _product(
    operand: tuple[jax.Array, jax.Array | None],
    refs: Refs,
    place: int,
    half: jax.Array,
    block: jax.Array | None = None,
) -> jax.Array:
    """Multiply an operand (`operand_of`) by a held matrix, and by the scales of its columns if any: float32."""
    matrix_KN, scales = refs.weights_H[place][half], refs.weights_H[3:]
    first = 0 if block is None else block * (matrix_KN.shape[0] // SCALE_BLOCK)
    return held_product(operand, matrix_KN, scales[place].at[half] if scales else None, first=first)
