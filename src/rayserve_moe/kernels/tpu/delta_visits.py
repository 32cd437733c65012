"""A token of a gated delta layer inside the kernel of `delta_rule`: its copies, a fold, and its products.

A state is multiplied by one key and one query. These products are sums over rows of registers in float32, which take
fewer bundles than the state takes to arrive; the matrix unit would need the state in three pieces of bfloat16.
"""

# T tokens   V visits   H value heads   K key heads   C tokens of a chunk   P places of decays   N buffers
# X heads of C tokens   d key width   v value width   W channels of a key head   B block of a token   G gates   Q sums
# S sides of writes

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import CHUNK, WINDOW_ROWS, DeltaPools

NUM_BUFFERS = 3
"""Visits whose states and rings are in the core's memory: one is computed and two arrive."""
TILE = 8
"""Tokens of a ring that are copied at once."""


@dataclass(frozen=True)
class VisitShape:
    """Static sizes of a call."""

    num_heads: int
    num_key_heads: int
    num_tokens: int
    num_cores: int
    num_before: int
    """Inputs of the convolution in an entry."""


class TokenScalars(NamedTuple):
    """Scalars of tokens in the core's scalar memory, int32 [T] unless noted."""

    position_T: Any
    row_T: Any
    source_T: Any
    """The entry to read."""
    own_T: Any
    """The entry to write with a fold."""
    folds_T: Any
    visit_T: Any
    """Number of the visit; -1 for padding."""
    ends_T: Any
    """1 for the last token of a visit."""
    starts_V: Any
    """First token of each visit, in order; the number of tokens behind the last visit."""
    layer_X: Any
    """First entry and first row of the layer."""


class TokenRefs(NamedTuple):
    """Inputs of a token, in a block of its own."""

    queries_BKd: Any
    keys_BKd: Any
    values_BHv: Any
    gates_BGH: Any
    """Logarithms of decays, and beta."""
    inputs_TKW: Any
    """Inputs of the convolution of all tokens, in HBM."""


class DeltaScratch(NamedTuple):
    """Buffers of a core: of visits, of a token, and of its writes."""

    state_NHdv: Any
    keys_NXd: Any
    """Heads of a token are adjacent: a head is read at a stride."""
    fresh_NXv: Any
    decay_NHP: Any
    weights_HP: Any
    """Decays of the tokens of a ring up to the token, or up to the end of the chunk."""
    sums_QHv: Any
    """Products of each head: key and query with the state, key and query with the ring, and query with key."""
    new_keys_SKd: Any
    new_fresh_SHv: Any
    new_decay_SHP: Any
    out_SHv: Any
    num_done: Any
    """Number of tokens, and of visits, whose writes the core has begun."""
    arrived_N: Any
    written_S: Any
    ended_S: Any
    folded: Any


class Call(NamedTuple):
    """Everything that a token's computation reads and writes.

    `pools` are the pools of all layers in HBM; heads of a ring's tokens follow each other, [R, C * heads, width].
    """

    scalars: TokenScalars
    given: TokenRefs
    out_THv: Any
    pools: DeltaPools
    scratch: DeltaScratch
    shape: VisitShape


def compute_token(*refs: Any, shape: VisitShape) -> None:
    """Compute a token of the grid [cores, tokens], if its visit belongs to the core."""
    sizes = (len(TokenScalars._fields), len(TokenRefs._fields), len(DeltaPools._fields))
    num_scalars, num_given, num_pools = sizes
    rest = refs[num_scalars + num_given + num_pools :]
    call = Call(
        TokenScalars(*refs[:num_scalars]),
        TokenRefs(*refs[num_scalars : num_scalars + num_given]),
        rest[0],
        DeltaPools(*rest[1 : 1 + num_pools]),
        DeltaScratch(*rest[1 + num_pools :]),
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
    copy = partial(pltpu.make_async_copy, sem=scratch.arrived_N.at[buffer])
    entry = call.scalars.layer_X[0] + call.scalars.source_T[token]
    act(copy(pools.state_EHdv.at[entry], scratch.state_NHdv.at[buffer]))
    act(copy(pools.decay_RCHx.at[row], scratch.decay_NHP.at[buffer]))
    num_known = jnp.where(call.scalars.folds_T[token] > 0, CHUNK, _place(call, token))

    def of_tile(tile: jax.Array, carry: None) -> None:
        rings = (pools.keys_RCKd, scratch.keys_NXd), (pools.fresh_RCHv, scratch.fresh_NXv)
        for pool, held in rings:
            num_rows = TILE * (pool.shape[1] // CHUNK)
            rows = pl.ds(pl.multiple_of(tile * num_rows, num_rows), num_rows)
            act(copy(pool.at[row, rows], held.at[buffer, rows]))

    jax.lax.fori_loop(0, pl.cdiv(num_known, TILE), of_tile, None)


def _fold(call: Call, token: jax.Array, buffer: jax.Array) -> None:
    """Compute the state after a full ring, and write it with the window ahead of the token to the row's own entry."""
    scratch, pools, shape = call.scratch, call.pools, call.shape
    # Rows of the window may be on their way.
    _wait_for_writes(call, token)
    entry, row, position = (
        call.scalars.layer_X[0] + call.scalars.own_T[token],
        _row(call, token),
        call.scalars.position_T,
    )
    _apply(_start, _window_copies(call, entry, row, position[token]))
    decay_HP = scratch.decay_NHP[buffer]
    scratch.weights_HP[...] = jnp.exp(decay_HP[:, CHUNK - 1 : CHUNK] - decay_HP)
    whole_HP = jnp.exp(jnp.broadcast_to(decay_HP[:, CHUNK - 1 : CHUNK], decay_HP.shape))
    scratch.sums_QHv[0] = whole_HP

    def fold_head(head: jax.Array, carry: None) -> None:
        (weight_P1,) = _columns(scratch.weights_HP[pl.ds(head, 1), :])
        keys_Cd = _ring_of_head(scratch.keys_NXd, buffer, jax.lax.div(head, _heads_of_key(shape)))
        added_dv = jax.lax.dot_general(
            keys_Cd * weight_P1[:CHUNK],
            _ring_of_head(scratch.fresh_NXv, buffer, head),
            (((0,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        whole_XP = scratch.sums_QHv[0, pl.ds(head, 1), :]
        scratch.state_NHdv[buffer, head] = scratch.state_NHdv[buffer, head] * whole_XP + added_dv

    jax.lax.fori_loop(0, shape.num_heads, fold_head, None)
    copy = pltpu.make_async_copy(scratch.state_NHdv.at[buffer], pools.state_EHdv.at[entry], scratch.folded)
    copy.start()
    copy.wait()
    _apply(_wait, _window_copies(call, entry, row, position[token]))


def _window_copies(call: Call, entry: jax.Array, row: jax.Array, position: jax.Array) -> Iterator[Any]:
    """Yield the copies of the last inputs of the convolution ahead of a position to an entry."""
    pools, num_before = call.pools, call.shape.num_before
    for back in range(num_before):
        place = jax.lax.rem(position - num_before + back, WINDOW_ROWS)
        source, target = pools.inputs_RJKW.at[row, place], pools.window_EJKW.at[entry, back]
        yield pltpu.make_async_copy(source, target, call.scratch.folded)


def _advance(call: Call, token: jax.Array, buffer: jax.Array) -> None:
    """Compute a token from its state and its ring, and write its rows."""
    scratch, place = call.scratch, _place(call, token)
    gates_GH, values_Hv = call.given.gates_BGH[0], call.given.values_BHv[0]
    decay_HP = scratch.decay_NHP[buffer]
    place_HP = jax.lax.broadcasted_iota(jnp.int32, decay_HP.shape, 1)
    # Select, never multiply: what stands behind the cursor may be NaN.
    known_H1 = jnp.sum(jnp.where(place_HP == place - 1, decay_HP, 0.0), axis=1, keepdims=True)
    total_H1 = known_H1 + _column(gates_GH[:1])
    scratch.weights_HP[...] = jnp.exp(jnp.where(place_HP < place, total_H1 - decay_HP, -jnp.inf))
    _multiply(call, buffer, place)
    key_state, query_state, key_ring, query_ring, query_key = (scratch.sums_QHv[part] for part in range(5))
    to_state_H1 = jnp.exp(total_H1)
    fresh_Hv = _column(gates_GH[1:]) * (values_Hv - (to_state_H1 * key_state + key_ring))
    out_Hv = to_state_H1 * query_state + query_ring + query_key * fresh_Hv
    # Later tokens of the visit read them.
    scratch.decay_NHP[buffer] = jnp.where(place_HP == place, total_H1, decay_HP)
    scratch.keys_NXd[buffer, _rows_of(place, call.shape.num_key_heads), :] = call.given.keys_BKd[0]
    scratch.fresh_NXv[buffer, _rows_of(place, call.shape.num_heads), :] = fresh_Hv
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


def _rows_of(place: jax.Array, num_heads: int) -> Any:
    """Return the rows of the heads of a token in a ring."""
    return pl.ds(pl.multiple_of(place * num_heads, num_heads), num_heads)


def _ring_of_head(held_NXw: Any, buffer: jax.Array, head: jax.Array) -> jax.Array:
    """Return the rows of a head in a ring, [C, w]."""
    return held_NXw[buffer, pl.ds(head, CHUNK, stride=held_NXw.shape[1] // CHUNK), :]


def _heads_of_key(shape: VisitShape) -> int:
    return shape.num_heads // shape.num_key_heads


def _multiply(call: Call, buffer: jax.Array, place: jax.Array) -> None:
    """Compute the products of all heads with their states and rings (`sums_QHv`)."""
    scratch, heads_of_key = call.scratch, _heads_of_key(call.shape)
    is_past_C1 = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < place

    def of_key_head(key_head: jax.Array, carry: None) -> None:
        given = call.given.keys_BKd, call.given.queries_BKd
        key, query = (rows_BKd[0, pl.ds(key_head, 1), :] for rows_BKd in given)
        weights = scratch.weights_HP[pl.ds(key_head * heads_of_key, heads_of_key), :]
        key_column, query_column, *weight_columns = _columns(jnp.concatenate([key, query, weights]))
        ring_Cd = _ring_of_head(scratch.keys_NXd, buffer, key_head)
        scores = (jnp.sum(ring_Cd * row, axis=1, keepdims=True) for row in (key, query))
        key_scores_C1, query_scores_C1 = (jnp.where(is_past_C1, each, 0.0) for each in scores)
        query_key_11 = jnp.sum(key * query, axis=1, keepdims=True)
        for of_key, weight_P1 in enumerate(weight_columns):
            head = key_head * heads_of_key + of_key
            state_dv = scratch.state_NHdv[buffer, head]
            fresh_Cv = jnp.where(is_past_C1, _ring_of_head(scratch.fresh_NXv, buffer, head), 0.0)
            sums = (
                jnp.sum(key_column * state_dv, axis=0, keepdims=True),
                jnp.sum(query_column * state_dv, axis=0, keepdims=True),
                jnp.sum(key_scores_C1 * weight_P1[:CHUNK] * fresh_Cv, axis=0, keepdims=True),
                jnp.sum(query_scores_C1 * weight_P1[:CHUNK] * fresh_Cv, axis=0, keepdims=True),
                jnp.broadcast_to(query_key_11, (1, fresh_Cv.shape[1])),
            )
            for part, row in enumerate(sums):
                scratch.sums_QHv[part, pl.ds(head, 1), :] = row

    jax.lax.fori_loop(0, call.shape.num_key_heads, of_key_head, None, unroll=8)


def _columns(rows_XP: jax.Array) -> list[jax.Array]:
    """Return rows as columns [P, 1]."""
    num_rows = len(rows_XP)
    padded = jnp.pad(rows_XP, ((0, -num_rows % 8), (0, 0)))
    return [padded.T[:, place : place + 1] for place in range(num_rows)]


def _column(row_XH: jax.Array) -> jax.Array:
    """Return a row [1, H] as a column [H, 1]: the diagonal of a square."""
    square = (row_XH.shape[1],) * 2
    is_diagonal = jax.lax.broadcasted_iota(jnp.int32, square, 0) == jax.lax.broadcasted_iota(jnp.int32, square, 1)
    return jnp.sum(jnp.where(is_diagonal, row_XH, 0.0), axis=1, keepdims=True)


def _row_writes(call: Call, token: jax.Array, side: jax.Array) -> Iterator[Any]:
    """Yield the copies of a token's rows to the pools, and of its output."""
    scratch, pools, row, place = call.scratch, call.pools, _row(call, token), _place(call, token)
    copy = partial(pltpu.make_async_copy, sem=scratch.written_S.at[side])
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
        scratch.new_decay_SHP.at[side], call.pools.decay_RCHx.at[row], scratch.ended_S.at[side]
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
