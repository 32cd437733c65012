"""Products of a token of a gated delta layer with its state and its ring, and the fold of a ring (`delta_rule`).

A state is multiplied by one key and one query. These products are sums over rows of registers in float32, which take
fewer bundles than the state takes to arrive; the matrix unit would need the state in three pieces of bfloat16. It
repeats columns, and multiplies keys of the ring, which bfloat16 holds exactly in models of that dtype.
"""

# C tokens of a chunk   d key width   v value width   H value heads   P places of decays   L lanes   X rows

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rayserve_moe.kernels.reference.gated_delta import CHUNK
from rayserve_moe.kernels.tpu.delta_call import Call
from rayserve_moe.kernels.tpu.packed_rows import LANES

UNROLL = 8
"""Key heads whose products overlap."""
ROWS = 8
"""Rows of a register of float32."""


def multiply(call: Call, buffer: jax.Array, place: jax.Array) -> None:
    """Compute the products of all heads with their states and rings (`sums_QHv`)."""
    scratch, heads_of_key, dtype = call.scratch, call.shape.heads_of_key, call.shape.dtype
    is_past_C1 = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0) < place

    def of_key_head(key_head: jax.Array, carry: None) -> None:
        given = call.given.keys_BKd, call.given.queries_BKd
        key, query = (rows_BKd[0, pl.ds(key_head, 1), :] for rows_BKd in given)
        weights = scratch.weights_HP[pl.ds(key_head * heads_of_key, heads_of_key), :]
        pair = _repeated_columns(jnp.concatenate([key, query]), dtype, num_parts=1)
        weights_CL = _repeated_columns(weights[:, :CHUNK], dtype, num_parts=1 if dtype == jnp.float32 else 3)
        ring_Cd = scratch.keys_KCd[key_head]
        scores_CX = jnp.where(
            is_past_C1, _dot(ring_Cd.astype(dtype), jnp.concatenate(pair, axis=1).astype(dtype), (1, 0)), 0.0
        )
        query_key_11 = jnp.sum(key * query, axis=1, keepdims=True)
        for of_key, weight_CL in enumerate(weights_CL):
            head = key_head * heads_of_key + of_key
            state_dv = scratch.state_NHdv[buffer, head]
            fresh_Cv = jnp.where(is_past_C1, scratch.fresh_HCv[head], 0.0) * weight_CL
            sums = (
                *(jnp.sum(column * state_dv, axis=0, keepdims=True) for column in pair),
                *(jnp.sum(scores * fresh_Cv, axis=0, keepdims=True) for scores in jnp.split(scores_CX, 2, axis=1)),
                jnp.broadcast_to(query_key_11, (1, fresh_Cv.shape[1])),
            )
            for part, row in enumerate(sums):
                scratch.sums_QHv[part, pl.ds(head, 1), :] = row

    jax.lax.fori_loop(0, call.shape.num_key_heads, of_key_head, None, unroll=UNROLL)


def _dot(one: jax.Array, other: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Return a product over a dimension of each, with sums in float32; float32 is multiplied as such."""
    precision = jax.lax.Precision.HIGHEST if one.dtype == jnp.float32 else None
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(one, other, dims, precision=precision, preferred_element_type=jnp.float32)


def _repeated_columns(rows_XL: jax.Array, dtype: jax.typing.DTypeLike, *, num_parts: int) -> list[jax.Array]:
    """Return rows as columns that are repeated over lanes, each [L, LANES].

    A product with ones makes them, because lanes are repeated slowly otherwise. `dtype` holds the rows exactly as a sum
    of so many numbers.
    """
    parts, rest_XL = [], rows_XL
    for _ in range(num_parts):
        parts.append(rest_XL.astype(dtype).astype(jnp.float32))
        rest_XL = rest_XL - parts[-1]
    stacked, num_rows = jnp.concatenate(parts), len(rows_XL)
    stacked = jnp.pad(stacked, ((0, -len(stacked) % 16), (0, 0))).astype(dtype)
    shape = (len(stacked), num_rows * LANES)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    is_same = (jax.lax.rem(row, num_rows) == jax.lax.div(column, LANES)) & (row < num_parts * num_rows)
    columns = _dot(stacked, jnp.where(is_same, 1.0, 0.0).astype(dtype), (0, 0))
    return jnp.split(columns, num_rows, axis=1)


def fold(call: Call, buffer: jax.Array) -> None:
    """Replace the state of a visit by the state after its full ring."""
    scratch, shape = call.scratch, call.shape
    decay_HP = scratch.decay_NHP[buffer]
    scratch.weights_HP[...] = jnp.exp(decay_HP[:, CHUNK - 1 : CHUNK] - decay_HP)
    whole_HP = jnp.exp(jnp.broadcast_to(decay_HP[:, CHUNK - 1 : CHUNK], decay_HP.shape))
    scratch.sums_QHv[0] = whole_HP

    def fold_head(head: jax.Array, carry: None) -> None:
        weight_P1 = _column_of(scratch.weights_HP[pl.ds(head, 1), :])
        keys_Cd = scratch.keys_KCd[jax.lax.div(head, shape.heads_of_key)]
        added_dv = jax.lax.dot_general(
            keys_Cd * weight_P1[:CHUNK],
            scratch.fresh_HCv[head],
            (((0,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        whole_XP = scratch.sums_QHv[0, pl.ds(head, 1), :]
        scratch.state_NHdv[buffer, head] = scratch.state_NHdv[buffer, head] * whole_XP + added_dv

    jax.lax.fori_loop(0, shape.num_heads, fold_head, None)


def _column_of(row_XP: jax.Array) -> jax.Array:
    """Return a row as a column [P, 1]."""
    return jnp.pad(row_XP, ((0, ROWS - 1), (0, 0))).T[:, :1]


def diagonal(row_XH: jax.Array) -> jax.Array:
    """Return a row [1, H] as a column [H, 1]: the diagonal of a square."""
    square = (row_XH.shape[1],) * 2
    is_diagonal = jax.lax.broadcasted_iota(jnp.int32, square, 0) == jax.lax.broadcasted_iota(jnp.int32, square, 1)
    return jnp.sum(jnp.where(is_diagonal, row_XH, 0.0), axis=1, keepdims=True)
