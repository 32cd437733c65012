"""Visits of the kernel of gated delta layers: their copies, and the order of their work (`delta_rule`)."""

# T tokens   P pieces   V visits   N tokens of a piece   K key heads   C tokens of a chunk
# H value heads   G blocks: LANES of values, of one head or several   L places of decays
# M heads along lanes   B buffers of visits   X heads of C tokens   d key width   v value width
# W channels of a key head   S sides of writes

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE, WINDOW_ROWS, DeltaPools
from rayserve_moe.kernels.tpu import delta_elements, delta_products, delta_state_space
from rayserve_moe.kernels.tpu.delta_call import (
    NUM_BUFFERS,
    Call,
    DeltaScratch,
    DeltaSemaphores,
    PieceRefs,
    PieceScalars,
    VisitShape,
)
from rayserve_moe.kernels.tpu.packed_rows import LANES

TILE = PIECE
"""Tokens of a ring that are copied at once."""


def compute_piece(*refs: Any, shape: VisitShape) -> None:
    """Compute a piece of the grid [cores, pieces], if its visit belongs to the core."""
    sizes = (len(PieceScalars._fields), len(PieceRefs._fields), len(DeltaPools._fields))
    num_scalars, num_given, num_pools = sizes
    rest = refs[num_scalars + num_given + num_pools :]
    scratch = rest[1 + num_pools :]
    call = Call(
        PieceScalars(*refs[:num_scalars]),
        PieceRefs(*refs[num_scalars : num_scalars + num_given]),
        rest[0],
        DeltaPools(*rest[1 : 1 + num_pools]),
        DeltaScratch(*scratch[: len(DeltaScratch._fields)]),
        DeltaSemaphores(*scratch[len(DeltaScratch._fields) :]),
        shape,
    )
    core, piece = pl.program_id(0), pl.program_id(1)

    @pl.when(piece == 0)
    def _() -> None:
        call.scratch.num_done[0] = call.scratch.num_done[1] = 0
        for ahead in range(NUM_BUFFERS - 1):
            _begin_visit(call, core + ahead * shape.num_cores, jnp.int32(ahead))

    visit = call.scalars.visit_P[piece]

    @pl.when((visit >= 0) & (jax.lax.rem(visit, shape.num_cores) == core))
    def _() -> None:
        of_core = jax.lax.div(visit, shape.num_cores)
        buffer = jax.lax.rem(of_core, NUM_BUFFERS)

        @pl.when(call.scalars.starts_V[visit] == piece)
        def _() -> None:
            _for_copies(call, piece, buffer, _wait)
            _sort_by_heads(call, piece, buffer)
            # The buffer of the visit before this one is free: what that visit writes is staged elsewhere.
            ahead = NUM_BUFFERS - 1
            _begin_visit(call, visit + ahead * shape.num_cores, jax.lax.rem(of_core + ahead, NUM_BUFFERS))

        pl.when(call.scalars.folds_P[piece] > 0)(partial(_fold, call, piece, buffer))
        _advance(call, piece, buffer)

    @pl.when(piece == shape.num_pieces - 1)
    def _() -> None:
        _wait_for_writes(call, piece)


def _place(call: Call, piece: jax.Array) -> jax.Array:
    """Return the place of the first new token in the ring."""
    return jax.lax.rem(call.scalars.start_P[piece], CHUNK) + call.scalars.known_P[piece]


def _row(call: Call, piece: jax.Array) -> jax.Array:
    return call.scalars.layer_X[1] + call.scalars.row_P[piece]


def _begin_visit(call: Call, visit: jax.Array, buffer: jax.Array) -> None:
    """Start the copies of a visit; there may be no such visit."""
    piece = call.scalars.starts_V[visit]

    @pl.when(piece < call.shape.num_pieces)
    def _() -> None:
        _for_copies(call, piece, buffer, _start)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _apply(act: Callable[[Any], None], copies: Iterable[Any]) -> None:
    for copy in copies:
        act(copy)


def _for_copies(call: Call, piece: jax.Array, buffer: jax.Array, act: Callable[[Any], None]) -> None:
    """Apply a function to the copies of a visit that begins at `piece`: its state, and its ring up to the cursor."""
    scratch, pools, row = call.scratch, call.pools, _row(call, piece)
    copy = partial(pltpu.make_async_copy, sem=call.semaphores.arrived_B.at[buffer])
    entry = call.scalars.layer_X[0] + call.scalars.source_P[piece]
    act(copy(pools.state_EHdv.at[entry], scratch.state_BGdv.at[buffer]))
    rings = [(pools.keys_RCKd, scratch.keys_BCKd), (pools.fresh_RCHv, scratch.fresh_BCGv)]
    if call.shape.by_element:
        rings.append((pools.decay_RCHx, scratch.decay_B))
    else:
        act(copy(pools.decay_RCHx.at[row], scratch.decay_B.at[buffer]))

    def of_tile(tile: jax.Array, carry: None) -> None:
        tokens = _tokens_of(tile)
        for pool, held in rings:
            act(copy(pool.at[row, tokens], held.at[buffer, tokens]))

    jax.lax.fori_loop(0, _num_tiles(call, piece), of_tile, None)


def _num_tiles(call: Call, piece: jax.Array) -> jax.Array:
    """Return the number of tiles of a ring that a visit reads, which begins at `piece`."""
    return pl.cdiv(jnp.where(call.scalars.folds_P[piece] > 0, CHUNK, _place(call, piece)), TILE)


def _sort_by_heads(call: Call, piece: jax.Array, buffer: jax.Array) -> None:
    """Put the tokens of each head next to each other: its rows could be read at a stride, but only one by one."""
    scratch = call.scratch

    def of_tile(tile: jax.Array, carry: None) -> None:
        tokens = _tokens_of(tile)
        scratch.keys_KCd[:, tokens, :] = scratch.keys_BCKd[buffer, tokens].swapaxes(0, 1)
        scratch.fresh_GCv[:, tokens, :] = scratch.fresh_BCGv[buffer, tokens].swapaxes(0, 1)
        if call.shape.by_element:
            scratch.decay_by_head[:, tokens, :] = scratch.decay_B[buffer, tokens].swapaxes(0, 1)

    jax.lax.fori_loop(0, _num_tiles(call, piece), of_tile, None)
    if not call.shape.by_element:
        scratch.decay_by_head[...] = _turned(scratch.decay_B[buffer])


def _turned(rows_HL: jax.Array) -> jax.Array:
    """Return the transposed of a square of lanes whose first rows are given."""
    return jnp.pad(rows_HL, ((0, LANES - len(rows_HL)), (0, 0))).T


def _fold(call: Call, piece: jax.Array, buffer: jax.Array) -> None:
    """Compute the state after a full ring, and write it with the window ahead of the piece to the row's own entry."""
    scratch, pools = call.scratch, call.pools
    # Rows of the window may be on their way.
    _wait_for_writes(call, piece)
    entry, row, position = (
        call.scalars.layer_X[0] + call.scalars.own_P[piece],
        _row(call, piece),
        call.scalars.start_P,
    )
    _apply(_start, _window_copies(call, entry, row, position[piece]))
    _products(call.shape).fold(call, buffer)
    copy = pltpu.make_async_copy(scratch.state_BGdv.at[buffer], pools.state_EHdv.at[entry], call.semaphores.folded)
    copy.start()
    copy.wait()
    _apply(_wait, _window_copies(call, entry, row, position[piece]))


def _products(shape: VisitShape) -> Any:
    """Return the module with the products of a rule."""
    if shape.by_element:
        return delta_elements
    return delta_products if shape.delta else delta_state_space


def _window_copies(call: Call, entry: jax.Array, row: jax.Array, position: jax.Array) -> Iterator[Any]:
    """Yield the copies of the last inputs of the convolution ahead of a position to an entry."""
    pools, num_before = call.pools, call.shape.num_before
    for back in range(num_before):
        place = jax.lax.rem(position - num_before + back, WINDOW_ROWS)
        source, target = pools.inputs_RJKW.at[row, place], pools.window_EJKW.at[entry, back]
        yield pltpu.make_async_copy(source, target, call.semaphores.folded)


def _advance(call: Call, piece: jax.Array, buffer: jax.Array) -> None:
    """Compute a piece from its state and its ring, and write its rows."""
    scratch, given = call.scratch, call.given
    known, count, place = call.scalars.known_P[piece], call.scalars.count_P[piece], _place(call, piece)
    start, tile = place - known, pl.ds(pl.multiple_of(place - known, TILE), TILE)
    token_N1 = jax.lax.broadcasted_iota(jnp.int32, (PIECE, 1), 0)
    is_known_N1, is_new_N1 = token_N1 < known, (token_N1 >= known) & (token_N1 < known + count)
    # Select, never multiply: what stands behind the cursor may be NaN.
    ring_KNd, keys_KNd = scratch.keys_KCd[:, tile, :], given.keys_NKd[...].swapaxes(0, 1)
    scratch.keys_KCd[:, tile, :] = jnp.where(is_known_N1, ring_KNd, jnp.where(is_new_N1, keys_KNd, 0.0))
    scratch.queries_KNd[...] = jnp.where(is_new_N1, given.queries_NKd[...].swapaxes(0, 1), 0.0)
    scratch.values_GNv[...] = jnp.where(is_new_N1, given.values_NGv[...].swapaxes(0, 1), 0.0)
    beta_NM = jnp.where(is_new_N1, given.beta_N1M[:, 0], 0.0)
    if call.shape.by_element:
        delta_elements.sum_decays(call, (start, known), is_new_N1, tile)
        delta_elements.multiply(call, buffer, (start, known), beta_NM)
        _write_rows(call, piece, tile)
        return
    total_NM = _summed_decays(call, piece, tile)
    # Later pieces of the visit read the sums, the products those of the piece behind the ring.
    heads, decay_HL = call.shape.num_heads, scratch.decay_B[buffer]
    place_L = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    own_HL = _turned(total_NM)[:heads]
    at_start_HL = pltpu.roll(own_HL, start, 1)
    is_place_L = (place_L >= place) & (place_L < place + count)
    scratch.decay_B[buffer] = jnp.where(is_place_L, at_start_HL, decay_HL)
    if call.shape.delta:
        scratch.reach_HL[...] = jnp.where(place_L < CHUNK, decay_HL, pltpu.roll(own_HL, CHUNK, 1))
    _products(call.shape).multiply(call, buffer, (start, known), (total_NM, beta_NM))
    _write_rows(call, piece, tile)
    # All pieces of a visit write the same sums of decays, so that only the last one may.
    pl.when(call.scalars.ends_P[piece] > 0)(partial(_write_decays, call, piece, buffer))


def _summed_decays(call: Call, piece: jax.Array, tile: Any) -> jax.Array:
    """Add up the decays of a piece, token by token: the only order of pieces with one token."""
    ring_CM, place = call.scratch.decay_by_head, _place(call, piece)
    known, count = call.scalars.known_P[piece], call.scalars.count_P[piece]
    token_N1 = jax.lax.broadcasted_iota(jnp.int32, (PIECE, 1), 0)
    last_M = jnp.where(place > 0, ring_CM[pl.ds(jnp.maximum(place - 1, 0), 1), :], 0.0)
    decay_NM = jnp.where((token_N1 >= known) & (token_N1 < known + count), call.given.decays_N[:, 0], 0.0)
    sums = []
    for token in range(PIECE):
        last_M = last_M + decay_NM[token : token + 1]
        sums.append(last_M)
    total_NM = jnp.where(token_N1 < known, ring_CM[tile, :], jnp.concatenate(sums))
    ring_CM[tile, :] = total_NM
    return total_NM


def _write_rows(call: Call, piece: jax.Array, tile: Any) -> None:
    """Start to write the rows of a piece."""
    scratch = call.scratch
    side = jax.lax.rem(scratch.num_done[0], 2)

    @pl.when(scratch.num_done[0] >= 2)
    def _() -> None:
        _wait_for_rows(call, side)

    scratch.new_keys_SNKd[side] = call.given.keys_NKd[...]
    scratch.new_fresh_SNGv[side] = scratch.fresh_GCv[:, tile, :].swapaxes(0, 1)
    scratch.out_SNGv[side] = scratch.out_GNv[...].swapaxes(0, 1)
    if call.shape.by_element:
        scratch.new_decay_S[side] = scratch.decay_by_head[:, tile, :].swapaxes(0, 1)
    _start_rows(call, piece, side)
    scratch.num_done[2 + side] = call.scalars.count_P[piece]
    scratch.num_done[0] = scratch.num_done[0] + 1


def _write_decays(call: Call, piece: jax.Array, buffer: jax.Array) -> None:
    """Start to write the sums of decays of a visit."""
    scratch = call.scratch
    side = jax.lax.rem(scratch.num_done[1], 2)

    @pl.when(scratch.num_done[1] >= 2)
    def _() -> None:
        _wait(_decay_write(call, piece, side))

    scratch.new_decay_S[side] = scratch.decay_B[buffer]
    _start(_decay_write(call, piece, side))
    scratch.num_done[1] = scratch.num_done[1] + 1


def _tokens_of(tile: jax.Array) -> Any:
    """Return the tokens of a tile."""
    return pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)


def _start_rows(call: Call, piece: jax.Array, side: jax.Array) -> None:
    """Start to write the new rows of a piece, together if the piece is full."""
    scalars, count = call.scalars, call.scalars.count_P[piece]
    held, place, token = scalars.known_P[piece], _place(call, piece), scalars.token_P[piece]
    window = jax.lax.rem(scalars.start_P[piece] + held, WINDOW_ROWS)

    @pl.when(count == PIECE)
    def _() -> None:
        _apply(_start, _row_writes(call, side, (_row(call, piece), held, place, token, window), PIECE))

    @pl.when(count < PIECE)
    def _() -> None:
        def of_token(ahead: jax.Array, carry: None) -> None:
            places = (_row(call, piece), held + ahead, place + ahead, token + ahead, window + ahead)
            _apply(_start, _row_writes(call, side, places, 1))

        jax.lax.fori_loop(0, count, of_token, None)


def _wait_for_rows(call: Call, side: jax.Array) -> None:
    """Wait until the rows of the last piece of a side are written; copies of any rows have the same sizes."""
    count, places = call.scratch.num_done[2 + side], (0, 0, 0, 0, 0)

    @pl.when(count == PIECE)
    def _() -> None:
        _apply(_wait, _row_writes(call, side, places, PIECE))

    @pl.when(count < PIECE)
    def _() -> None:
        jax.lax.fori_loop(0, count, lambda _, __: _apply(_wait, _row_writes(call, side, places, 1)), None)


def _row_writes(call: Call, side: jax.Array, places: tuple[Any, ...], num_tokens: int) -> Iterator[Any]:
    """Yield the copies of tokens of a piece to the pools, and of their outputs.

    `places` are their row, and the first one's number in the piece, places in the ring, among all tokens and in the
    window.
    """
    scratch, pools, (row, held, place, token, window) = call.scratch, call.pools, places
    copy = partial(pltpu.make_async_copy, sem=call.semaphores.written_S.at[side])
    rows, ring, tokens = (pl.ds(first, num_tokens) for first in (held, place, token))
    yield copy(scratch.new_keys_SNKd.at[side, rows], pools.keys_RCKd.at[row, ring])
    yield copy(scratch.new_fresh_SNGv.at[side, rows], pools.fresh_RCHv.at[row, ring])
    if call.shape.by_element:
        yield copy(scratch.new_decay_S.at[side, rows], pools.decay_RCHx.at[row, ring])
    yield copy(scratch.out_SNGv.at[side, rows], call.out_THv.at[tokens])
    yield copy(call.given.inputs_TKW.at[tokens], pools.inputs_RJKW.at[row, pl.ds(window, num_tokens)])


def _decay_write(call: Call, piece: jax.Array, side: jax.Array) -> Any:
    """Return the copy of a row's sums of decays to the pool."""
    scratch, row = call.scratch, _row(call, piece)
    return pltpu.make_async_copy(
        scratch.new_decay_S.at[side], call.pools.decay_RCHx.at[row], call.semaphores.ended_S.at[side]
    )


def _wait_for_writes(call: Call, piece: jax.Array) -> None:
    """Wait until all writes are in the pools; copies of any `piece` have the same sizes."""
    done = call.scratch.num_done

    def wait_for_rows(back: jax.Array, carry: None) -> None:
        _wait_for_rows(call, jax.lax.rem(done[0] - 1 - back, 2))

    def wait_for_decays(back: jax.Array, carry: None) -> None:
        _wait(_decay_write(call, piece, jax.lax.rem(done[1] - 1 - back, 2)))

    jax.lax.fori_loop(0, jnp.minimum(done[0], 2), wait_for_rows, None)
    if not call.shape.by_element:
        jax.lax.fori_loop(0, jnp.minimum(done[1], 2), wait_for_decays, None)
    done[0] = done[1] = 0
