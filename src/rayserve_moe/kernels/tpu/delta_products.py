"""Products of a piece of a gated delta layer with its state and its ring, and the fold of a ring (`delta_rule`).

The matrix unit multiplies the rows of a piece, always eight of them. Numbers in float32 are multiplied as three numbers
of bfloat16, which hold queries and keys exactly in models of that dtype. A row of a product does not depend on other
rows, so a token has the same sums alone and in a prompt. Tokens of a piece solve among themselves one after the other.
"""

# N tokens of a piece   C tokens of a chunk   d key width   v value width   H value heads   M heads along lanes
# G blocks of values: here heads   B buffers of visits   K key heads
# L places of decays   X queries, then keys of a piece   R places of a ring, then tokens of the piece

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE
from rayserve_moe.kernels.tpu.delta_call import Call
from rayserve_moe.kernels.tpu.packed_rows import LANES

MAX_HEADS, MAX_FOLDED = 16, 8
"""Maximum number of value heads whose products overlap, in a piece and in a fold; more spill registers."""
REACH = CHUNK + PIECE
"""Places of a ring, and tokens of the piece."""


class _Reach(NamedTuple):
    """What the tokens of a piece see."""

    start: jax.Array
    """The place of the piece in the ring."""
    is_known_N1: jax.Array
    is_past_C1: jax.Array
    is_seen_XR: jax.Array
    """Places before the piece, and of its tokens those up to a query, and those before a key."""


def multiply(
    call: Call, buffer: jax.Array, place: tuple[jax.Array, jax.Array], decays: tuple[jax.Array, jax.Array]
) -> None:
    """Compute outputs and fresh values of a piece, by heads.

    `place` are the place of the piece in the ring, and the number of its known tokens; `decays` are the sums of decays
    up to its tokens, and betas, with heads along lanes.
    """
    start, known = place
    row_X1, column_R = iota((2 * PIECE, 1), 0), iota((1, REACH), 1)
    token_X1 = jnp.where(row_X1 < PIECE, row_X1, row_X1 - PIECE - 1)
    is_seen_XR = ((column_R < start) | (column_R >= CHUNK)) & (column_R - CHUNK <= token_X1)
    reach = _Reach(start, iota((PIECE, 1), 0) < known, iota((CHUNK, 1), 0) < start, is_seen_XR)
    size = group_size(call.shape.num_key_heads, call.shape.heads_of_key, MAX_HEADS)
    num_lanes = size * call.shape.heads_of_key

    def of_group(group: jax.Array, carry: None) -> None:
        total_NM, beta_NM = (lanes_of_group(each, group, num_lanes) for each in decays)
        _multiply_group(call, buffer, (group, size), reach, (total_NM, beta_NM))

    jax.lax.fori_loop(0, call.shape.num_key_heads // size, of_group, None)


def _multiply_group(
    call: Call,
    buffer: jax.Array,
    place: tuple[jax.Array, int],
    reach: _Reach,
    decays: tuple[jax.Array, jax.Array],
) -> None:
    """Compute a group of key heads; each step is taken for all of them, so that their chains of sums overlap.

    `place` are the number and the size of the group, `decays` as for `multiply` those of its heads.
    """
    scratch, heads_of_key, dtype = call.scratch, call.shape.heads_of_key, call.shape.dtype
    tile = pl.ds(reach.start, PIECE)
    (group, size), (total_NM, beta_NM) = place, decays
    key_heads = [group * size + each for each in range(size)]
    heads = [group * size * heads_of_key + each for each in range(size * heads_of_key)]
    totals, betas = ([each[:, lane : lane + 1] for lane in range(len(heads))] for each in (total_NM, beta_NM))
    keys = [scratch.keys_KCd[key_head, tile, :] for key_head in key_heads]
    rows = [
        jnp.concatenate([scratch.queries_KNd[key_head], keys_Nd]).astype(dtype)
        for key_head, keys_Nd in zip(key_heads, keys, strict=True)
    ]
    scores = [
        dot(rows_Xd, jnp.concatenate([scratch.keys_KCd[key_head], keys_Nd]).astype(dtype), (1, 1))
        for key_head, keys_Nd, rows_Xd in zip(key_heads, keys, rows, strict=True)
    ]
    states = [[scratch.state_BGdv[buffer, head] for head in _of_key(heads, each, heads_of_key)] for each in range(size)]
    of_states = [product for each in zip(rows, states, strict=True) for product in by_states(*each)]
    weights = [
        _weights(scores[lane // heads_of_key], totals[lane], scratch.reach_HL[pl.ds(head, 1), :REACH], reach.is_seen_XR)
        for lane, head in enumerate(heads)
    ]
    rings = [jnp.where(reach.is_past_C1, scratch.fresh_GCv[head], 0.0) for head in heads]
    of_rings = by_pairs([each[:, :CHUNK] for each in weights], rings, dtype)
    unsolved = []
    for lane, head in enumerate(heads):
        seen_XR, to_state_N1 = weights[lane], jnp.exp(totals[lane])
        out_Nv, said_Nv = (
            to_state_N1 * of_state_Nv + of_ring_Nv
            for of_state_Nv, of_ring_Nv in zip(jnp.split(of_states[lane], 2), jnp.split(of_rings[lane], 2), strict=True)
        )
        fresh_Nv = betas[lane] * (scratch.values_GNv[head] - said_Nv)
        fresh_Nv = jnp.where(reach.is_known_N1, scratch.fresh_GCv[head, tile, :], fresh_Nv)
        ahead_NR = jnp.where(reach.is_known_N1, 0.0, betas[lane] * seen_XR[PIECE:])
        unsolved.append((out_Nv, fresh_Nv, seen_XR[:PIECE, CHUNK:], ahead_NR[:, CHUNK:]))
    for head, (out_Nv, fresh_Nv) in zip(heads, solved(unsolved), strict=True):
        scratch.fresh_GCv[head, tile, :] = fresh_Nv
        scratch.out_GNv[head] = out_Nv


def lanes_of_group(rows_NM: jax.Array, group: jax.Array, size: int) -> jax.Array:
    """Return the `size` lanes of a group of heads."""
    return pltpu.roll(rows_NM, jnp.where(group > 0, LANES - group * size, 0), 1)[:, :size]


def _of_key(heads: list[Any], key_head: int, heads_of_key: int) -> list[Any]:
    """Return the part of a list of heads that belongs to a key head of a group."""
    return heads[key_head * heads_of_key :][:heads_of_key]


def group_size(num_key_heads: int, heads_of_key: int, max_heads: int) -> int:
    """Return the number of key heads whose products overlap."""
    sizes = (size for size in range(1, num_key_heads + 1) if num_key_heads % size == 0)
    return max((size for size in sizes if size * heads_of_key <= max_heads), default=1)


def solved(
    unsolved: list[tuple[jax.Array, jax.Array, jax.Array, jax.Array]],
) -> list[tuple[jax.Array, jax.Array]]:
    """Return outputs and fresh values of heads: a token's are final once those of all tokens before it are taken.

    Given are both without other tokens of the piece, and the weights of these for outputs and for fresh values.
    """
    for token in range(PIECE):
        column, taken = slice(token, token + 1), []
        for out_Nv, fresh_Nv, seen_NN, ahead_NN in unsolved:
            solved_v = fresh_Nv[column]
            out_Nv = out_Nv + seen_NN[:, column] * solved_v
            if token + 1 < PIECE:
                fresh_Nv = fresh_Nv - ahead_NN[:, column] * solved_v
            taken.append((out_Nv, fresh_Nv, seen_NN, ahead_NN))
        unsolved = taken
    return [(out_Nv, fresh_Nv) for out_Nv, fresh_Nv, *_ in unsolved]


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """Return the index of each element along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _parts(wide: jax.Array) -> list[jax.Array]:
    """Return three arrays of bfloat16 whose sum is the array."""
    parts = [wide.astype(jnp.bfloat16)]
    for _ in range(2):
        wide = wide - parts[-1].astype(jnp.float32)
        parts.append(wide.astype(jnp.bfloat16))
    return parts


def _weights(scores_XR: jax.Array, total_N1: jax.Array, reach_R: jax.Array, is_seen_XR: jax.Array) -> jax.Array:
    """Return scores with the decays from what they are of, zeros for what tokens do not see."""
    decay_NR = jnp.exp(total_N1 - reach_R)
    return jnp.where(is_seen_XR, scores_XR * jnp.concatenate([decay_NR, decay_NR]), 0.0)


def by_states(rows_Xd: jax.Array, states: list[jax.Array]) -> list[jax.Array]:
    """Return the products of rows with the state of each head."""
    wide = jnp.concatenate(states, axis=1)
    if rows_Xd.dtype == jnp.float32:
        products = dot(rows_Xd, wide, (1, 0))
    else:
        high, middle, low = _parts(wide)
        twice = jnp.concatenate([rows_Xd, rows_Xd], axis=1)
        products = dot(twice, jnp.concatenate([high, middle]), (1, 0)) + dot(rows_Xd, low, (1, 0))
    return jnp.split(products, len(states), axis=1)


def by_pairs(
    rows: list[jax.Array], others: list[jax.Array], dtype: jax.typing.DTypeLike, *, over: tuple[int, int] = (1, 0)
) -> list[jax.Array]:
    """Return the product of the rows of each head with another array of the head, both in float32.

    `over` are the dimensions that are summed over, as for `dot`.
    """
    if dtype == jnp.float32:
        return [dot(*each, over) for each in zip(rows, others, strict=True)]
    found, kept = [], 1 - over[1]
    for first in range(0, len(rows), 2):
        # A matrix unit is as wide as two heads; each row needs one of them.
        pair = slice(first, first + 2)
        joined, size, width = jnp.concatenate(rows[pair]), len(rows[0]), others[0].shape[kept]
        num_rows, parts = len(joined), _parts(joined)
        high, middle, low = (
            dot(jnp.concatenate(parts[: 3 - each]), part, over)
            for each, part in enumerate(_parts(jnp.concatenate(others[pair], axis=kept)))
        )
        of_small = high[2 * num_rows :] + middle[num_rows:] + low
        sums = high[:num_rows] + ((high[num_rows : 2 * num_rows] + middle[:num_rows]) + of_small)
        found += [sums[each * size :][:size, each * width : (each + 1) * width] for each in range(len(rows[pair]))]
    return found


def dot(one: jax.Array, other: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Return a product over a dimension of each, with sums in float32; float32 is multiplied as such."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(one, other, dims, precision=precision, preferred_element_type=jnp.float32)


def fold(call: Call, buffer: jax.Array) -> None:
    """Replace the state of a visit by the state after its full ring."""
    scratch, shape = call.scratch, call.shape
    weights_LM = fold_weights(scratch.decay_B[buffer])
    size = group_size(shape.num_key_heads, shape.heads_of_key, MAX_FOLDED)
    num_lanes = size * shape.heads_of_key

    def fold_group(group: jax.Array, carry: None) -> None:
        # All heads of a group are read before any is written, so that their sums overlap.
        columns_LM = pltpu.roll(weights_LM, jnp.where(group > 0, LANES - group * num_lanes, 0), 1)
        heads = [group * num_lanes + lane for lane in range(num_lanes)]
        fresh = [scratch.fresh_GCv[head] * columns_LM[:CHUNK, lane : lane + 1] for lane, head in enumerate(heads)]
        added = [
            part
            for each in range(size)
            for part in by_keys(
                scratch.keys_KCd[group * size + each], _of_key(fresh, each, shape.heads_of_key), shape.dtype
            )
        ]
        folded = [
            scratch.state_BGdv[buffer, head] * columns_LM[CHUNK : CHUNK + 1, lane : lane + 1] + added[lane]
            for lane, head in enumerate(heads)
        ]
        for head, state_dv in zip(heads, folded, strict=True):
            scratch.state_BGdv[buffer, head] = state_dv

    jax.lax.fori_loop(0, shape.num_key_heads // size, fold_group, None)


def fold_weights(decay_HL: jax.Array) -> jax.Array:
    """Return the weights of a ring in a fold, [places of the ring, then the state; heads along lanes]."""
    last_H1 = decay_HL[:, CHUNK - 1 : CHUNK]
    is_ring_L = iota((1, LANES), 1) < CHUNK
    weights_HL = jnp.exp(jnp.where(is_ring_L, last_H1 - decay_HL, last_H1))
    return jnp.pad(weights_HL, ((0, LANES - len(weights_HL)), (0, 0))).T


def by_keys(keys_Cd: jax.Array, fresh: list[jax.Array], dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """Return the sums over tokens of products of keys and fresh values, for each head."""
    fresh_Cv = jnp.concatenate(fresh, axis=1)
    if dtype == jnp.float32:
        added = dot(keys_Cd, fresh_Cv, (0, 0))
    else:
        high, middle, low = (dot(keys_Cd.astype(dtype), part, (0, 0)) for part in _parts(fresh_Cv))
        added = high + (middle + low)
    return jnp.split(added, len(fresh), axis=1)
