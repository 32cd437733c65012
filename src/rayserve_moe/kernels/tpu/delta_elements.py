"""Products of a piece with a decay for each element of a key, and the fold of a ring (`delta_rule`).

Rows are multiplied by decays ahead of products, whose operands are therefore float32. Between a token ahead of the
piece and one in it, the decay is split at the start of the piece, so that both factors are at most 1. Between tokens of
the piece, it is the exponential of a difference of sums, element by element. Every value head has its own key head.
"""

# N tokens of a piece   C tokens of a chunk   d key width   v value width   H heads   M heads along lanes
# G blocks of values: here heads   B buffers of visits   K key heads
# X queries, then keys of a piece

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE
from rayserve_moe.kernels.tpu.delta_call import Call
from rayserve_moe.kernels.tpu.delta_products import by_pairs, dot, group_size, iota, lanes_of_group, solved
from rayserve_moe.kernels.tpu.packed_rows import LANES

MAX_HEADS, MAX_FOLDED = 16, 4
"""Maximum number of heads whose products overlap, in a piece and in a fold."""


def sum_decays(call: Call, place: tuple[jax.Array, jax.Array], is_new_N1: jax.Array, tile: Any) -> None:
    """Add up the decays of a piece by heads, token by token: the only order of pieces with one token.

    `place` holds the place of the piece in the ring and the number of its known tokens.
    """
    ring_HCd, (start, known) = call.scratch.decay_by_head, place
    first = start + known
    last_H1d = ring_HCd[:, pl.ds(jnp.maximum(first - 1, 0), 1), :]
    last_H1d = jnp.where(first > 0, last_H1d, 0.0)
    decay_HNd = jnp.where(is_new_N1, call.given.decays_N[...].swapaxes(0, 1), 0.0)
    sums = []
    for token in range(PIECE):
        last_H1d = last_H1d + decay_HNd[:, token : token + 1]
        sums.append(last_H1d)
    is_known_N1 = iota((PIECE, 1), 0) < known
    ring_HCd[:, tile, :] = jnp.where(is_known_N1, ring_HCd[:, tile, :], jnp.concatenate(sums, axis=1))


def multiply(call: Call, buffer: jax.Array, place: tuple[jax.Array, jax.Array], beta_NM: jax.Array) -> None:
    """Compute outputs and fresh values of a piece, by heads; `place` as for `sum_decays`."""
    size = group_size(call.shape.num_heads, 1, MAX_HEADS)

    def of_group(group: jax.Array, carry: None) -> None:
        betas_NM = lanes_of_group(beta_NM, group, size)
        _multiply_group(call, buffer, [group * size + lane for lane in range(size)], (betas_NM, *place))

    jax.lax.fori_loop(0, call.shape.num_heads // size, of_group, None)


class _Rows(NamedTuple):
    """Queries and keys of a head in a piece, and the keys ahead of the piece."""

    rows_Xd: jax.Array
    """Queries, then keys."""
    total_Xd: jax.Array
    """Sums of decays up to each row."""
    near_Xd: jax.Array
    """Rows times their decays since the piece's start."""
    past_Cd: jax.Array
    """Keys ahead of the piece times their decays up to its start."""


def _rows_of(call: Call, head: jax.Array, start: jax.Array) -> _Rows:
    scratch, tile = call.scratch, pl.ds(start, PIECE)
    decay_HCd = scratch.decay_by_head
    before_1d = decay_HCd[head, pl.ds(jnp.maximum(start - 1, 0), 1), :]
    before_1d = jnp.where(start > 0, before_1d, 0.0)
    rows_Xd = jnp.concatenate([scratch.queries_KNd[head], scratch.keys_KCd[head, tile, :]])
    total_Xd = jnp.concatenate([decay_HCd[head, tile, :]] * 2)
    past_Cd = scratch.keys_KCd[head] * jnp.exp(before_1d - decay_HCd[head])
    past_Cd = jnp.where(iota((CHUNK, 1), 0) < start, past_Cd, 0.0)
    return _Rows(rows_Xd, total_Xd, rows_Xd * jnp.exp(total_Xd - before_1d), past_Cd)


def _multiply_group(
    call: Call, buffer: jax.Array, heads: list[jax.Array], piece: tuple[jax.Array, jax.Array, jax.Array]
) -> None:
    """Compute a group of heads, each step for all of them. `piece` holds its betas and the `place` of `multiply`."""
    scratch, dtype, (betas_NM, start, known) = call.scratch, call.shape.dtype, piece
    tile, is_known_N1 = pl.ds(start, PIECE), iota((PIECE, 1), 0) < known
    is_past_C1 = iota((CHUNK, 1), 0) < start
    of_heads = [_rows_of(call, head, start) for head in heads]
    seen = by_pairs([each.near_Xd for each in of_heads], [each.past_Cd for each in of_heads], dtype, over=(1, 1))
    of_states = by_pairs(
        [each.rows_Xd * jnp.exp(each.total_Xd) for each in of_heads],
        [scratch.state_BGdv[buffer, head] for head in heads],
        dtype,
    )
    of_rings = by_pairs(seen, [jnp.where(is_past_C1, scratch.fresh_GCv[head], 0.0) for head in heads], dtype)
    unsolved = []
    for lane, head in enumerate(heads):
        beta_N1, own_XN = betas_NM[:, lane : lane + 1], _own_scores(of_heads[lane])
        out_Nv, said_Nv = jnp.split(of_states[lane] + of_rings[lane], 2)
        fresh_Nv = beta_N1 * (scratch.values_GNv[head] - said_Nv)
        fresh_Nv = jnp.where(is_known_N1, scratch.fresh_GCv[head, tile, :], fresh_Nv)
        ahead_NN = jnp.where(is_known_N1, 0.0, beta_N1 * own_XN[PIECE:])
        unsolved.append((out_Nv, fresh_Nv, own_XN[:PIECE], ahead_NN))
    for head, (out_Nv, fresh_Nv) in zip(heads, solved(unsolved), strict=True):
        scratch.fresh_GCv[head, tile, :] = fresh_Nv
        scratch.out_GNv[head] = out_Nv


def _own_scores(own: _Rows) -> jax.Array:
    """Return the products of rows with keys of the piece and with the decays between them, [X, N].

    A query sees tokens up to its own, a key the tokens before its own.
    """
    row_X1, column_N = iota((2 * PIECE, 1), 0), iota((1, PIECE), 1)
    own_XN = jnp.zeros((2 * PIECE, PIECE), jnp.float32)
    for token in range(PIECE):
        one = slice(PIECE + token, PIECE + token + 1)
        # Earlier rows do not see the token. Their differences are positive and may overflow.
        decay_Xd = jnp.exp(jnp.minimum(own.total_Xd - own.total_Xd[one], 0.0))
        score_X1 = jnp.sum(own.rows_Xd * own.rows_Xd[one] * decay_Xd, axis=1, keepdims=True)
        own_XN = jnp.where(column_N == token, score_X1, own_XN)
    token_X1 = jnp.where(row_X1 < PIECE, row_X1, row_X1 - PIECE - 1)
    return jnp.where(column_N <= token_X1, own_XN, 0.0)


def fold(call: Call, buffer: jax.Array) -> None:
    """Replace the state of a visit by the state after its full ring."""
    scratch, num_heads = call.scratch, call.shape.num_heads
    size = group_size(num_heads, 1, MAX_FOLDED)

    def fold_group(group: jax.Array, carry: None) -> None:
        folded = []
        for head in (group * size + lane for lane in range(size)):
            decay_Cd = scratch.decay_by_head[head]
            last_1d = decay_Cd[CHUNK - 1 : CHUNK]
            added_dv = dot(scratch.keys_KCd[head] * jnp.exp(last_1d - decay_Cd), scratch.fresh_GCv[head], (0, 0))
            kept_dv = jnp.broadcast_to(jnp.exp(last_1d), (LANES, LANES)).T
            folded.append((head, scratch.state_BGdv[buffer, head] * kept_dv + added_dv))
        for head, state_dv in folded:
            scratch.state_BGdv[buffer, head] = state_dv

    jax.lax.fori_loop(0, num_heads // size, fold_group, None)
