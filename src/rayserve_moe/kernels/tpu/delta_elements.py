"""Products of a piece with a decay for each element of a key, and the fold of a ring (`delta_rule`).

Rows are multiplied by decays before products, so both sides are float32 and are multiplied as such. Between tokens
ahead of the piece and those in it, decays meet at the piece's start, so that both factors are at most 1. Tokens of the
piece are multiplied element by element, with the difference of their logarithms. Every value head has its own key head.
"""

# N tokens of a piece   C tokens of a chunk   d key width   v value width   H heads   M heads along lanes
# X queries, then keys of a piece

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE
from rayserve_moe.kernels.tpu.delta_call import Call
from rayserve_moe.kernels.tpu.delta_products import dot, group_size, iota, lanes_of_group, solved
from rayserve_moe.kernels.tpu.packed_rows import LANES

MAX_HEADS, MAX_FOLDED = 4, 4
"""Maximum number of heads whose products overlap, in a piece and in a fold."""


def sum_decays(call: Call, place: tuple[jax.Array, jax.Array], is_new_N1: jax.Array, tile: Any) -> None:
    """Add the decays of a piece one after the other, by heads: a piece with one token has no other order.

    `place` are the place of the piece in the ring, and the number of its known tokens.
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
        heads = [group * size + lane for lane in range(size)]
        unsolved = [
            _of_head(call, buffer, (head, betas_NM[:, lane : lane + 1]), place) for lane, head in enumerate(heads)
        ]
        for head, (out_Nv, fresh_Nv) in zip(heads, solved(unsolved), strict=True):
            call.scratch.fresh_HCv[head, pl.ds(place[0], PIECE), :] = fresh_Nv
            call.scratch.out_HNv[head] = out_Nv

    jax.lax.fori_loop(0, call.shape.num_heads // size, of_group, None)


def _of_head(
    call: Call, buffer: jax.Array, of: tuple[jax.Array, jax.Array], place: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the arguments of `delta_products.solved` of a head; `of` are its number and betas [N, 1]."""
    scratch, (head, beta_N1), (start, known) = call.scratch, of, place
    tile, is_past_C1 = pl.ds(start, PIECE), iota((CHUNK, 1), 0) < start
    is_known_N1 = iota((PIECE, 1), 0) < known
    decay_Cd, keys_Nd = scratch.decay_by_head[head], scratch.keys_KCd[head, tile, :]
    total_Nd = scratch.decay_by_head[head, tile, :]
    before_1d = scratch.decay_by_head[head, pl.ds(jnp.maximum(start - 1, 0), 1), :]
    before_1d = jnp.where(start > 0, before_1d, 0.0)
    rows_Xd = jnp.concatenate([scratch.queries_KNd[head], keys_Nd])
    total_Xd = jnp.concatenate([total_Nd, total_Nd])
    past_Cd = jnp.where(is_past_C1, scratch.keys_KCd[head] * jnp.exp(before_1d - decay_Cd), 0.0)
    seen_XC = dot(rows_Xd * jnp.exp(total_Xd - before_1d), past_Cd, (1, 1))
    fresh_Cv = jnp.where(is_past_C1, scratch.fresh_HCv[head], 0.0)
    sums_Xv = dot(rows_Xd * jnp.exp(total_Xd), scratch.state_BHdv[buffer, head], (1, 0))
    sums_Xv = sums_Xv + dot(seen_XC, fresh_Cv, (1, 0))
    own_XN = _own_scores(rows_Xd, total_Xd, keys_Nd, total_Nd)
    out_Nv, said_Nv = jnp.split(sums_Xv, 2)
    fresh_Nv = beta_N1 * (scratch.values_HNv[head] - said_Nv)
    fresh_Nv = jnp.where(is_known_N1, scratch.fresh_HCv[head, tile, :], fresh_Nv)
    ahead_NN = jnp.where(is_known_N1, 0.0, beta_N1 * own_XN[PIECE:])
    return out_Nv, fresh_Nv, own_XN[:PIECE], ahead_NN


def _own_scores(rows_Xd: jax.Array, total_Xd: jax.Array, keys_Nd: jax.Array, total_Nd: jax.Array) -> jax.Array:
    """Return products of rows with keys of the piece and the decays between them.

    A query sees tokens up to its own, a key those before it.
    """
    row_X1, column_N = iota((2 * PIECE, 1), 0), iota((1, PIECE), 1)
    own_XN = jnp.zeros((2 * PIECE, PIECE), jnp.float32)
    for token in range(PIECE):
        one = slice(token, token + 1)
        # Behind a token, where nothing is seen, differences are positive and may overflow.
        decay_Xd = jnp.exp(jnp.minimum(total_Xd - total_Nd[one], 0.0))
        score_X1 = jnp.sum(rows_Xd * keys_Nd[one] * decay_Xd, axis=1, keepdims=True)
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
            added_dv = dot(scratch.keys_KCd[head] * jnp.exp(last_1d - decay_Cd), scratch.fresh_HCv[head], (0, 0))
            kept_dv = jnp.broadcast_to(jnp.exp(last_1d), (LANES, LANES)).T
            folded.append((head, scratch.state_BHdv[buffer, head] * kept_dv + added_dv))
        for head, state_dv in folded:
            scratch.state_BHdv[buffer, head] = state_dv

    jax.lax.fori_loop(0, num_heads // size, fold_group, None)
