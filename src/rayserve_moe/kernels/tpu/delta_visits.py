"""Visits of the kernel of gated delta layers: their copies, and the order of their work (`delta_rule`)."""

# T tokens   V visits   H value heads   K key heads   C tokens of a chunk   P places of decays   N buffers
# X heads of C tokens   d key width   v value width   W channels of a key head   B block of a token   G gates   Q sums
# S sides of writes

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import CHUNK, WINDOW_ROWS, DeltaPools
from rayserve_moe.kernels.tpu.delta_call import (
    NUM_BUFFERS,
    Call,
    DeltaScratch,
    DeltaSemaphores,
    TokenRefs,
    TokenScalars,
    VisitShape,
)
from rayserve_moe.kernels.tpu.delta_products import diagonal, fold, multiply

TILE = 8
"""Tokens of a ring that are copied at once."""


def compute_token(*refs: Any, shape: VisitShape) -> None:
    """Compute a token of the grid [cores, tokens], if its visit belongs to the core."""
    sizes = (len(TokenScalars._fields), len(TokenRefs._fields), len(DeltaPools._fields))
    num_scalars, num_given, num_pools = sizes
    rest = refs[num_scalars + num_given + num_pools :]
    scratch = rest[1 + num_pools :]
    call = Call(
        TokenScalars(*refs[:num_scalars]),
        TokenRefs(*refs[num_scalars : num_scalars + num_given]),
        rest[0],
        DeltaPools(*rest[1 : 1 + num_pools]),
        DeltaScratch(*scratch[: len(DeltaScratch._fields)]),
        DeltaSemaphores(*scratch[len(DeltaScratch._fields) :]),
        shape,
    )
    core, token = pl.program_id(0), pl.program_id(1)

    @pl.when(token == 0)
    def _() -> None:
        call.scratch.num_done[0] = call.scratch.num_done[1] = 0
        for ahead in range(NUM_BUFFERS - 1):
            _begin_visit(call, core + ahead * shape.num_cores, jnp.int32(ahead))

    visit = call.scalars.visit_T[token]

    @pl.when((visit >= 0) & (jax.lax.rem(visit, shape.num_cores) == core))
    def _() -> None:
        of_core = jax.lax.div(visit, shape.num_cores)
        buffer = jax.lax.rem(of_core, NUM_BUFFERS)

        @pl.when(call.scalars.starts_V[visit] == token)
        def _() -> None:
            _for_copies(call, token, buffer, _wait)
            _sort_by_heads(call, token, buffer)
            # The buffer of the visit before this one is free: what that visit writes is staged elsewhere.
            ahead = NUM_BUFFERS - 1
            _begin_visit(call, visit + ahead * shape.num_cores, jax.lax.rem(of_core + ahead, NUM_BUFFERS))

        pl.when(call.scalars.folds_T[token] > 0)(partial(_fold, call, token, buffer))
        _advance(call, token, buffer)

    @pl.when(token == shape.num_tokens - 1)
    def _() -> None:
        _wait_for_writes(call, token)


def _place(call: Call, token: jax.Array) -> jax.Array:
    return jax.lax.rem(call.scalars.position_T[token], CHUNK)


def _row(call: Call, token: jax.Array) -> jax.Array:
    return call.scalars.layer_X[1] + call.scalars.row_T[token]


def _begin_visit(call: Call, visit: jax.Array, buffer: jax.Array) -> None:
    """Start the copies of a visit; there may be no such visit."""
    token = call.scalars.starts_V[visit]

    @pl.when(token < call.shape.num_tokens)
    def _() -> None:
        _for_copies(call, token, buffer, _start)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _apply(act: Callable[[Any], None], copies: Iterable[Any]) -> None:
    for copy in copies:
        act(copy)


def _for_copies(call: Call, token: jax.Array, buffer: jax.Array, act: Callable[[Any], None]) -> None:
    """Apply a function to the copies of a visit that begins at `token`: its state, and its ring up to the cursor."""
    scratch, pools, row = call.scratch, call.pools, _row(call, token)
    copy = partial(pltpu.make_async_copy, sem=call.semaphores.arrived_N.at[buffer])
    entry = call.scalars.layer_X[0] + call.scalars.source_T[token]
    act(copy(pools.state_EHdv.at[entry], scratch.state_NHdv.at[buffer]))
    act(copy(pools.decay_RCHx.at[row], scratch.decay_NHP.at[buffer]))

    def of_tile(tile: jax.Array, carry: None) -> None:
        for pool, held in (pools.keys_RCKd, scratch.keys_NXd), (pools.fresh_RCHv, scratch.fresh_NXv):
            rows = _rows_of(tile, TILE * (pool.shape[1] // CHUNK))
            act(copy(pool.at[row, rows], held.at[buffer, rows]))

    jax.lax.fori_loop(0, _num_tiles(call, token), of_tile, None)


def _num_tiles(call: Call, token: jax.Array) -> jax.Array:
    """Return the number of tiles of a ring that a visit reads, which begins at `token`."""
    return pl.cdiv(jnp.where(call.scalars.folds_T[token] > 0, CHUNK, _place(call, token)), TILE)


def _sort_by_heads(call: Call, token: jax.Array, buffer: jax.Array) -> None:
    """Put the tokens of each head next to each other: its rows could be read at a stride, but only one by one."""
    scratch = call.scratch

    def of_tile(tile: jax.Array, carry: None) -> None:
        for held_NXw, ring_Cw in (scratch.keys_NXd, scratch.keys_KCd), (scratch.fresh_NXv, scratch.fresh_HCv):
            num_heads, _, width = ring_Cw.shape
            rows_XHw = held_NXw[buffer, _rows_of(tile, TILE * num_heads), :].reshape(TILE, num_heads, width)
            ring_Cw[:, _rows_of(tile, TILE), :] = rows_XHw.swapaxes(0, 1)

    jax.lax.fori_loop(0, _num_tiles(call, token), of_tile, None)


def _fold(call: Call, token: jax.Array, buffer: jax.Array) -> None:
    """Compute the state after a full ring, and write it with the window ahead of the token to the row's own entry."""
    scratch, pools = call.scratch, call.pools
    # Rows of the window may be on their way.
    _wait_for_writes(call, token)
    entry, row, position = (
        call.scalars.layer_X[0] + call.scalars.own_T[token],
        _row(call, token),
        call.scalars.position_T,
    )
    _apply(_start, _window_copies(call, entry, row, position[token]))
    fold(call, buffer)
    copy = pltpu.make_async_copy(scratch.state_NHdv.at[buffer], pools.state_EHdv.at[entry], call.semaphores.folded)
    copy.start()
    copy.wait()
    _apply(_wait, _window_copies(call, entry, row, position[token]))


def _window_copies(call: Call, entry: jax.Array, row: jax.Array, position: jax.Array) -> Iterator[Any]:
    """Yield the copies of the last inputs of the convolution ahead of a position to an entry."""
    pools, num_before = call.pools, call.shape.num_before
    for back in range(num_before):
        place = jax.lax.rem(position - num_before + back, WINDOW_ROWS)
        source, target = pools.inputs_RJKW.at[row, place], pools.window_EJKW.at[entry, back]
        yield pltpu.make_async_copy(source, target, call.semaphores.folded)


def _advance(call: Call, token: jax.Array, buffer: jax.Array) -> None:
    """Compute a token from its state and its ring, and write its rows."""
    scratch, place = call.scratch, _place(call, token)
    gates_GH, values_Hv = call.given.gates_BGH[0], call.given.values_BHv[0]
    decay_HP = scratch.decay_NHP[buffer]
    place_HP = jax.lax.broadcasted_iota(jnp.int32, decay_HP.shape, 1)
    # Select, never multiply: what stands behind the cursor may be NaN.
    known_H1 = jnp.sum(jnp.where(place_HP == place - 1, decay_HP, 0.0), axis=1, keepdims=True)
    total_H1 = known_H1 + diagonal(gates_GH[:1])
    scratch.weights_HP[...] = jnp.exp(jnp.where(place_HP < place, total_H1 - decay_HP, -jnp.inf))
    multiply(call, buffer, place)
    key_state, query_state, key_ring, query_ring, query_key = (scratch.sums_QHv[part] for part in range(5))
    to_state_H1 = jnp.exp(total_H1)
    fresh_Hv = diagonal(gates_GH[1:]) * (values_Hv - (to_state_H1 * key_state + key_ring))
    out_Hv = to_state_H1 * query_state + query_ring + query_key * fresh_Hv
    # Later tokens of the visit read them.
    scratch.decay_NHP[buffer] = jnp.where(place_HP == place, total_H1, decay_HP)

    @pl.when(call.scalars.ends_T[token] == 0)
    def _() -> None:
        scratch.keys_KCd[:, pl.ds(place, 1), :] = call.given.keys_BKd[0][:, None]
        scratch.fresh_HCv[:, pl.ds(place, 1), :] = fresh_Hv[:, None]

    side = jax.lax.rem(scratch.num_done[0], 2)

    @pl.when(scratch.num_done[0] >= 2)
    def _() -> None:
        _apply(_wait, _row_writes(call, token, side))

    scratch.new_keys_SKd[side] = call.given.keys_BKd[0]
    scratch.new_fresh_SHv[side] = fresh_Hv
    scratch.out_SHv[side] = out_Hv
    _apply(_start, _row_writes(call, token, side))
    scratch.num_done[0] = scratch.num_done[0] + 1
    # All tokens of a visit write the same sums of decays, so that only the last one may.
    pl.when(call.scalars.ends_T[token] > 0)(partial(_write_decays, call, token, buffer))


def _write_decays(call: Call, token: jax.Array, buffer: jax.Array) -> None:
    """Start to write the sums of decays of a visit."""
    scratch = call.scratch
    side = jax.lax.rem(scratch.num_done[1], 2)

    @pl.when(scratch.num_done[1] >= 2)
    def _() -> None:
        _wait(_decay_write(call, token, side))

    scratch.new_decay_SHP[side] = scratch.decay_NHP[buffer]
    _start(_decay_write(call, token, side))
    scratch.num_done[1] = scratch.num_done[1] + 1


def _rows_of(group: jax.Array, num_rows: int) -> Any:
    """Return the rows of a group of rows."""
    return pl.ds(pl.multiple_of(group * num_rows, num_rows), num_rows)


def _row_writes(call: Call, token: jax.Array, side: jax.Array) -> Iterator[Any]:
    """Yield the copies of a token's rows to the pools, and of its output."""
    scratch, pools, row, place = call.scratch, call.pools, _row(call, token), _place(call, token)
    copy = partial(pltpu.make_async_copy, sem=call.semaphores.written_S.at[side])
    of_keys, of_fresh = _rows_of(place, call.shape.num_key_heads), _rows_of(place, call.shape.num_heads)
    yield copy(scratch.new_keys_SKd.at[side], pools.keys_RCKd.at[row, of_keys])
    yield copy(scratch.new_fresh_SHv.at[side], pools.fresh_RCHv.at[row, of_fresh])
    yield copy(scratch.out_SHv.at[side], call.out_THv.at[token])
    window = jax.lax.rem(call.scalars.position_T[token], WINDOW_ROWS)
    yield copy(call.given.inputs_TKW.at[token], pools.inputs_RJKW.at[row, window])


def _decay_write(call: Call, token: jax.Array, side: jax.Array) -> Any:
    """Return the copy of a row's sums of decays to the pool."""
    scratch, row = call.scratch, _row(call, token)
    return pltpu.make_async_copy(
        scratch.new_decay_SHP.at[side], call.pools.decay_RCHx.at[row], call.semaphores.ended_S.at[side]
    )


def _wait_for_writes(call: Call, token: jax.Array) -> None:
    """Wait until all writes are in the pools; copies of any `token` have the same sizes."""
    done = call.scratch.num_done

    def wait_for_rows(back: jax.Array, carry: None) -> None:
        _apply(_wait, _row_writes(call, token, jax.lax.rem(done[0] - 1 - back, 2)))

    def wait_for_decays(back: jax.Array, carry: None) -> None:
        _wait(_decay_write(call, token, jax.lax.rem(done[1] - 1 - back, 2)))

    jax.lax.fori_loop(0, jnp.minimum(done[0], 2), wait_for_rows, None)
    jax.lax.fori_loop(0, jnp.minimum(done[1], 2), wait_for_decays, None)
    done[0] = done[1] = 0
