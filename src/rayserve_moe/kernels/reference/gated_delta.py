"""Layers with a recurrent state on a grid of 64 tokens (gated delta rule, arXiv:2412.06464), by XLA.

A sequence starts at an entry: the state S after a multiple of CHUNK tokens. Tokens after it lie in a ring of the row as
(key, fresh, decay), which are final once computed. With G_i = g_1 + ... + g_i since the entry:

    fresh_i = beta_i (v_i - (e^G_i k_i)' S - sum_{j<i} (k_i . e^(G_i - G_j) k_j) fresh_j)      (no delta: beta_i v_i)
    out_i   = (e^G_i q_i)' S + sum_{j<=i} (q_i . e^(G_i - G_j) k_j) fresh_j
    S'      = e^G_C S + sum_j (e^(G_C - G_j) k_j) fresh_j'

Tokens are computed in pieces of up to PIECE tokens that do not cross multiples of PIECE. Prefill and decode call the
same function for a piece, and a row of it depends on earlier rows alone, so that outputs and states do not depend on
how tokens came, to the last bit.
"""

# T tokens   P pieces   N tokens of a piece   C tokens of a chunk   J taps   R rows   E entries
# H value heads   K key heads   d key width   v value width   x decays of a head: 1, or d
# W channels of a key head before the convolution

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
"""Tokens from one entry to the next."""
PIECE = 8
"""Tokens that are computed together."""
WINDOW_ROWS = 16
"""Inputs of the convolution that a row keeps: enough for a chain of drafts and the tokens that they read."""

_dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class DeltaPools(NamedTuple):
    """Pools of the layers of a kind, float32: entries, and a ring for each row; [layers * entries or rows, ...].

    Values of several heads may lie side by side: states [E, H / n, d, n * v] and fresh values [R, C, H / n, n * v].
    Inputs of the convolution may lie in rows of any width, as the tokens' inputs do. A TPU pads rows to 128 lanes.
    """

    state_EHdv: jax.Array
    """States after multiples of CHUNK tokens."""
    window_EJKW: jax.Array
    """The last inputs of the convolution ahead of an entry, oldest first; as many as taps but one."""
    keys_RCKd: jax.Array
    fresh_RCHv: jax.Array
    decay_RCHx: jax.Array
    """Sums of g since the entry. With a decay per head they may be [R, H, places], with a place per token and more:
    XLA on TPUs chooses a layout by other sizes if the last is below 128, and copies the pool between layouts."""
    inputs_RJKW: jax.Array
    """Inputs of the convolution; position p lies at p % WINDOW_ROWS."""


class RowEntries(NamedTuple):
    """Entries of rows, int32 [B]."""

    own: jax.Array
    """The entry that the row writes."""
    source: jax.Array
    """The entry that holds the state after `source_base` tokens; 0 for zeros."""
    source_base: jax.Array
    """States after any other number of tokens lie in `own`."""


class Pieces(NamedTuple):
    """Pieces of a step in the order in which they are computed, int32 [P]."""

    row: jax.Array
    start: jax.Array
    """Position of the piece, a multiple of PIECE."""
    known: jax.Array
    """Number of its tokens that are in the ring already."""
    count: jax.Array
    """Number of new tokens; 0 for padding."""
    token: jax.Array
    """Index of the first new token in the step."""
    entries: RowEntries


class DeltaTokens(NamedTuple):
    """Inputs of the recurrence."""

    queries_TKd: jax.Array
    keys_TKd: jax.Array
    values_THv: jax.Array
    decay_THx: jax.Array
    """Logarithms of decays, float32, at most 0."""
    beta_TH: jax.Array
    """Float32."""
    inputs_TKW: jax.Array
    """Inputs of the convolution."""


def cut_pieces(
    positions_T: jax.Array, rows_B: jax.Array, entries: RowEntries, *, num_singles: int, block_tokens: int
) -> Pieces:
    """Cut single tokens [U], then blocks of `block_tokens` tokens, into pieces; positions are -1 for padding.

    `rows_B` and `entries` belong to single tokens and blocks. The tokens of a block are adjacent.
    """
    singles, blocks = slice(None, num_singles), slice(num_singles, None)
    position_U = positions_T[singles]
    single = Pieces(
        rows_B[singles],
        jnp.maximum(position_U, 0) // PIECE * PIECE,
        jnp.maximum(position_U, 0) % PIECE,
        (position_U >= 0).astype(jnp.int32),
        jnp.arange(num_singles, dtype=jnp.int32),
        RowEntries(*(each[singles] for each in entries)),
    )
    num_blocks = len(rows_B) - num_singles
    if not num_blocks:
        return single
    positions_BQ = positions_T[blocks].reshape(num_blocks, block_tokens)
    first_B1, count_B1 = jnp.maximum(positions_BQ[:, :1], 0), jnp.sum(positions_BQ >= 0, axis=1, keepdims=True)
    starts_Bn = first_B1 // PIECE * PIECE + PIECE * jnp.arange(block_tokens // PIECE + 1)
    begin_Bn = jnp.maximum(starts_Bn, first_B1)
    end_Bn = jnp.minimum(starts_Bn + PIECE, first_B1 + count_B1)
    first_token_B1 = num_singles + block_tokens * jnp.arange(num_blocks)[:, None]
    num_pieces = starts_Bn.shape[1]

    def of_blocks(values_B: jax.Array) -> jax.Array:
        return jnp.repeat(values_B[blocks], num_pieces)

    block = Pieces(
        of_blocks(rows_B),
        starts_Bn.reshape(-1),
        (begin_Bn - starts_Bn).reshape(-1),
        jnp.maximum(end_Bn - begin_Bn, 0).reshape(-1),
        (first_token_B1 + begin_Bn - first_B1).reshape(-1),
        RowEntries(*map(of_blocks, entries)),
    )
    return jax.tree.map(lambda *parts: jnp.concatenate(parts).astype(jnp.int32), single, block)


def advance(
    tokens: DeltaTokens, pools: DeltaPools, pieces: Pieces, *, layer: tuple[jax.Array, ...], delta: bool = True
) -> tuple[jax.Array, DeltaPools]:
    """Compute the pieces of a step one after the other: outputs float32 [T, H, v], and the pools.

    A piece that begins a chunk first folds the chunk before it into the row's own entry. Inputs that are not finite are
    computed as zeros, and their outputs are NaN. `layer` are the first entry and row of the layer in the pools.
    """
    first_entry, first_row = layer
    num_tokens, num_heads, width = tokens.values_THv.shape
    lanes = jnp.arange(PIECE)

    def visit(carry: tuple[jax.Array, DeltaPools], piece: Pieces) -> tuple[tuple[jax.Array, DeltaPools], None]:
        return jax.lax.cond(piece.count > 0, compute, lambda carry, piece: carry, carry, piece), None

    def compute(carry: tuple[jax.Array, DeltaPools], piece: Pieces) -> tuple[jax.Array, DeltaPools]:
        out_THv, pools = carry
        row = first_row + piece.row
        begins = (piece.start % CHUNK == 0) & (piece.known == 0)
        folds = begins & (piece.start != piece.entries.source_base)
        base = piece.start // CHUNK * CHUNK - CHUNK * folds
        source = jnp.where(base == piece.entries.source_base, piece.entries.source, piece.entries.own)
        state_Hdv = _state_of(pools, first_entry + source, num_heads)

        def folded(state_Hdv: jax.Array, pools: DeltaPools) -> tuple[jax.Array, DeltaPools]:
            return _fold_into(first_entry + piece.entries.own, row, piece.start, state_Hdv, pools)

        state_Hdv, pools = jax.lax.cond(folds, folded, lambda *unchanged: unchanged, state_Hdv, pools)
        index_b = jnp.clip(piece.token + lanes - piece.known, 0, num_tokens - 1)
        is_new_b = (lanes >= piece.known) & (lanes < piece.known + piece.count)
        given = DeltaTokens(*(_masked(each[index_b], is_new_b) for each in tokens))
        fresh_CHv = pools.fresh_RCHv[row].reshape(CHUNK, num_heads, width)
        ring = _Ring(state_Hdv, pools.keys_RCKd[row], fresh_CHv, _decay_ring(pools, row))
        out_NHv, rows = _compute_piece(given, ring, piece.start % CHUNK, piece.known, delta=delta)
        index_b = jnp.where(is_new_b, index_b, num_tokens)
        out_THv = out_THv.at[index_b].set(out_NHv, mode="drop")
        place_b = piece.start % CHUNK + lanes
        place_b = jnp.where(is_new_b, place_b, CHUNK)
        rings = (
            pool.at[row, place_b].set(new.reshape(PIECE, *pool.shape[2:]), mode="drop")
            for pool, new in zip(pools[2:4], rows[:2], strict=True)
        )
        decays = _with_decays(pools.decay_RCHx, row, place_b, rows[2])
        window_b = jnp.where(is_new_b, (piece.start + lanes) % WINDOW_ROWS, WINDOW_ROWS)
        inputs = pools.inputs_RJKW.at[row, window_b].set(given.inputs_TKW.astype(jnp.float32), mode="drop")
        return out_THv, DeltaPools(pools.state_EHdv, pools.window_EJKW, *rings, decays, inputs)

    out_THv = jnp.zeros((num_tokens, num_heads, width), jnp.float32)
    return jax.lax.scan(visit, (out_THv, pools), pieces)[0]


def _masked(rows: jax.Array, is_there_b: jax.Array) -> jax.Array:
    return jnp.where(is_there_b.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)


def _fold_into(
    entry: jax.Array, row: jax.Array, position: jax.Array, state_Hdv: jax.Array, pools: DeltaPools
) -> tuple[jax.Array, DeltaPools]:
    """Write the state after a full ring, and the window ahead of `position`, to an entry; return the state too."""
    decay_CHx = _decay_ring(pools, row)
    last_Hx = decay_CHx[-1]
    keys_CHd = _repeat_heads(pools.keys_RCKd[row], len(state_Hdv)) * jnp.exp(last_Hx - decay_CHx)
    fresh_CHv = pools.fresh_RCHv[row].reshape(*keys_CHd.shape[:2], -1)
    added_Hdv = _dot("jhd,jhv->hdv", keys_CHd, fresh_CHv)
    state_Hdv = state_Hdv * jnp.exp(last_Hx)[..., None] + added_Hdv
    num_before = pools.window_EJKW.shape[1]
    window_JKW = pools.inputs_RJKW[row, (position - num_before + jnp.arange(num_before)) % WINDOW_ROWS]
    return state_Hdv, pools._replace(
        state_EHdv=_with_state(pools.state_EHdv, entry, state_Hdv),
        window_EJKW=pools.window_EJKW.at[entry].set(window_JKW),
    )


def _state_of(pools: DeltaPools, entry: jax.Array, num_heads: int) -> jax.Array:
    """Return the state of an entry, [H, d, v]."""
    state = pools.state_EHdv[entry]
    num_blocks, width, num_lanes = state.shape
    if num_blocks == num_heads:
        return state
    apart = state.reshape(num_blocks, width, num_heads // num_blocks, -1).swapaxes(1, 2)
    return apart.reshape(num_heads, width, num_lanes * num_blocks // num_heads)


def _with_state(pool: jax.Array, entry: jax.Array, state_Hdv: jax.Array) -> jax.Array:
    """Write a state to an entry of the pool."""
    num_blocks, width, num_lanes = pool.shape[1:]
    if num_blocks != len(state_Hdv):
        apart = state_Hdv.reshape(num_blocks, -1, *state_Hdv.shape[1:])
        state_Hdv = apart.swapaxes(1, 2).reshape(num_blocks, width, num_lanes)
    return pool.at[entry].set(state_Hdv)


def _decay_ring(pools: DeltaPools, row: jax.Array) -> jax.Array:
    """Return the sums of decays of a row, [C, H, x]."""
    ring = pools.decay_RCHx[row]
    return ring if ring.ndim == 3 else ring[:, :CHUNK].T[..., None]


def _with_decays(pool: jax.Array, row: jax.Array, place_b: jax.Array, decay_NHx: jax.Array) -> jax.Array:
    """Write the decays of a piece into a row of the pool; places from CHUNK on are dropped."""
    if pool.ndim == 4:
        return pool.at[row, place_b].set(decay_NHx, mode="drop")
    ring_HC = pool[row, :, :CHUNK].at[:, place_b].set(decay_NHx[..., 0].T, mode="drop")
    return pool.at[row, :, :CHUNK].set(ring_HC)


class _Ring(NamedTuple):
    """State and ring of a row."""

    state_Hdv: jax.Array
    keys_CKd: jax.Array
    fresh_CHv: jax.Array
    decay_CHx: jax.Array


def _compute_piece(
    given: DeltaTokens, ring: _Ring, start: jax.Array, known: jax.Array, *, delta: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Compute the tokens of a piece at place `start` of the ring: outputs [b, H, v], and keys, fresh and decay.

    `given` hold zeros for the first `known` tokens, which the ring has, and behind the new ones.
    """
    num_heads = given.values_THv.shape[1]
    parts = (given.queries_TKd, given.keys_TKd, given.values_THv, given.decay_THx, given.beta_TH, given.inputs_TKW)
    # A row that is not finite would reach the rows before it, as 0 * NaN in a product.
    finite = [jnp.all(jnp.isfinite(part.reshape(PIECE, -1)), axis=1) for part in parts]
    is_sound_b = jnp.stack(finite).all(axis=0)
    given = DeltaTokens(*(_masked(part, is_sound_b) for part in given))
    index, place = jnp.arange(PIECE), jnp.arange(CHUNK)
    is_old = (index < known)[:, None, None]
    old_keys, old_fresh, old_decay = (
        jax.lax.dynamic_slice_in_dim(part, start, PIECE) for part in (ring.keys_CKd, ring.fresh_CHv, ring.decay_CHx)
    )
    own_keys_NKd = jnp.where(is_old, old_keys, given.keys_TKd.astype(jnp.float32))
    keys_NHd = _repeat_heads(own_keys_NKd, num_heads)
    queries_NHd = _repeat_heads(given.queries_TKd.astype(jnp.float32), num_heads)
    decay_NHx = jnp.where(is_old, old_decay, _summed(given.decay_THx, ring, start + known))
    before_Hx = jnp.where(start > 0, ring.decay_CHx[jnp.maximum(start - 1, 0)], 0.0)
    is_past_C11 = (place < start)[:, None, None]
    # Select, never multiply: what stands behind the cursor may be NaN.
    past_keys_CHd = jnp.where(is_past_C11, _repeat_heads(ring.keys_CKd, num_heads), 0.0)
    past_fresh_CHv = jnp.where(is_past_C11, ring.fresh_CHv, 0.0)
    past_decay_CHx = jnp.where(is_past_C11, ring.decay_CHx, 0.0)
    decays = _Decays(decay_NHx, before_Hx, past_decay_CHx, is_past_C11)
    over_past, over_own = _scores_of(decays, keys_NHd, past_keys_CHd)
    to_state = jnp.exp(decay_NHx)
    beta_NH1 = given.beta_TH[..., None]
    fresh_NHv = beta_NH1 * given.values_THv.astype(jnp.float32)
    weights_NNH = jnp.zeros((PIECE, PIECE, num_heads), jnp.float32)
    if delta:
        said_NHv = _dot("ihd,hdv->ihv", keys_NHd * to_state, ring.state_Hdv)
        said_NHv = said_NHv + _dot("ijh,jhv->ihv", over_past(keys_NHd), past_fresh_CHv)
        fresh_NHv = fresh_NHv - beta_NH1 * said_NHv
        is_below = (index[:, None] > index)[..., None]
        weights_NNH = given.beta_TH[:, None] * jnp.where(is_below, over_own(keys_NHd), 0.0)
    solved_NHv = _solved(fresh_NHv, weights_NNH, known=known, first_NHv=jnp.where(is_old, old_fresh, 0.0))
    out_NHv = _dot("ihd,hdv->ihv", queries_NHd * to_state, ring.state_Hdv)
    out_NHv = out_NHv + _dot("ijh,jhv->ihv", over_past(queries_NHd), past_fresh_CHv)
    out_NHv = out_NHv + _dot("ijh,jhv->ihv", over_own(queries_NHd), solved_NHv)
    out_NHv = jnp.where(is_sound_b[:, None, None], out_NHv, jnp.nan)
    return out_NHv, (own_keys_NKd, solved_NHv, decay_NHx)


def _summed(decay_NHx: jax.Array, ring: _Ring, at: jax.Array) -> jax.Array:
    """Return the sums of decays of new tokens from place `at` on; `decay_NHx` are zeros for known tokens.

    Sums are formed one row after the other from the last known row: a step with one row has no other order.
    """
    last_Hx = jnp.where(at > 0, ring.decay_CHx[jnp.maximum(at - 1, 0)], 0.0)
    return jax.lax.scan(lambda total, row: (total + row,) * 2, last_Hx, decay_NHx)[1]


def _solved(fresh_NHv: jax.Array, weights_NNH: jax.Array, *, known: jax.Array, first_NHv: jax.Array) -> jax.Array:
    """Subtract weighted earlier tokens from each new token, one after the other; `first_NHv` holds the known ones."""

    def solve(i: jax.Array, solved_NHv: jax.Array) -> jax.Array:
        row_Hv = jax.lax.dynamic_index_in_dim(fresh_NHv, i, keepdims=False)
        weight_NH = jax.lax.dynamic_index_in_dim(weights_NNH, i, keepdims=False)
        row_Hv = row_Hv - _dot("jh,jhv->hv", weight_NH, solved_NHv)
        return jax.lax.dynamic_update_index_in_dim(solved_NHv, row_Hv, i, 0)

    return jax.lax.fori_loop(known, PIECE, solve, first_NHv)


class _Decays(NamedTuple):
    """Sums of g since the entry: of the tokens of a piece, ahead of the piece, and of the tokens before it."""

    own_NHx: jax.Array
    before_Hx: jax.Array
    past_CHx: jax.Array
    is_past_C11: jax.Array


def _scores_of(
    decays: _Decays, keys_NHd: jax.Array, past_keys_CHd: jax.Array
) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Return two functions of rows [N, H, d]: their decayed products with past keys, and with keys of the piece."""
    decay_NHx, before_Hx, past_decay_CHx, is_past_C11 = decays
    index = jnp.arange(PIECE)
    is_lower = index[:, None] >= index
    if decay_NHx.shape[-1] == 1:
        to_past = jnp.where(is_past_C11[..., 0], (decay_NHx[:, None] - past_decay_CHx)[..., 0], -jnp.inf)
        to_past = jnp.exp(to_past)
        inside = jnp.exp(jnp.where(is_lower[..., None], (decay_NHx[:, None] - decay_NHx)[..., 0], -jnp.inf))

        def over_past(rows_NHd: jax.Array) -> jax.Array:
            return _dot("ihd,jhd->ijh", rows_NHd, past_keys_CHd) * to_past

        def over_own(rows_NHd: jax.Array) -> jax.Array:
            return _dot("ihd,jhd->ijh", rows_NHd, keys_NHd) * inside

    else:
        # Factors meet at the end of the piece before, so that both are at most 1. Inside a piece the difference of
        # logarithms is taken first. Nothing overflows.
        since = jnp.exp(decay_NHx - before_Hx)
        till = jnp.exp(jnp.where(is_past_C11, before_Hx - past_decay_CHx, -jnp.inf))
        inside = jnp.exp(jnp.where(is_lower[..., None, None], decay_NHx[:, None] - decay_NHx, -jnp.inf))

        def over_past(rows_NHd: jax.Array) -> jax.Array:
            return _dot("ihd,jhd->ijh", rows_NHd * since, past_keys_CHd * till)

        def over_own(rows_NHd: jax.Array) -> jax.Array:
            return jnp.sum(rows_NHd[:, None] * keys_NHd * inside, axis=-1)

    return over_past, over_own


def _repeat_heads(rows: jax.Array, num_heads: int) -> jax.Array:
    """Repeat key heads [..., K, d] for their value heads [..., H, d]; value head h reads key head h // (H / K)."""
    return jnp.repeat(rows, num_heads // rows.shape[-2], axis=-2)
