"""Matrices in 8 bits and their scales: one of each column, or one for each block of a column's rows.

A product with a scale per column is multiplied by it afterwards. Blocks of rows are scaled in float32 ahead of the
product, so that what is multiplied is what the matrix would be if it was held in the dtype of the rows.
"""

# K rows, over which a product adds up   N columns   Z blocks of rows that have scales of their own

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

SCALE_BLOCK = 128
"""Rows, and columns, of a matrix that share a scale, where it has several."""
NARROW = ("int8", "float8_e4m3fn")
"""Dtypes of matrices with scales."""
_SUBLANES = 8


def scale_rows(num_rows: int) -> int:
    """How many rows the scales of blocks of a matrix have: one per block, and zeros up to a multiple of eight.

    TPUs lay out arrays in rows of eight, and would copy those of another number ahead of a kernel.
    """
    return -(-num_rows // (SCALE_BLOCK * _SUBLANES)) * _SUBLANES


def in_blocks(scales: jax.Array | None) -> bool:
    """Whether scales [..., Z, N] are those of blocks of rows."""
    return scales is not None and scales.shape[-2] > 1


def dequantized(matrix_KN: jax.Array, scales_ZN: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The numbers that a matrix in blocks stands for: scaled in float32, and rounded once to `dtype`, [..., K, N]."""
    scales = jnp.repeat(scales_ZN, SCALE_BLOCK, axis=-2)[..., : matrix_KN.shape[-2], :]
    return (matrix_KN.astype(jnp.float32) * scales).astype(dtype)


def held_matrix(matrix_KN: jax.Array, row_of: Callable[[int], jax.Array] | None, dtype: jnp.dtype) -> jax.Array:
    """What a kernel of TPUs multiplies with: a matrix that it holds, converted to `dtype`, [K, N].

    `row_of` returns the scales [1, N] of a block of rows; None: products are scaled, or nothing is. Each number of
    either dtype of 8 bits is one of bfloat16, and of float32.
    """
    if row_of is None:
        return _converted(matrix_KN, dtype)
    starts = range(0, matrix_KN.shape[0], SCALE_BLOCK)
    blocks = (_converted(matrix_KN[first : first + SCALE_BLOCK], dtype).astype(jnp.float32) for first in starts)
    return jnp.concatenate([(block * row_of(i)).astype(dtype) for i, block in enumerate(blocks)])


def _converted(matrix_KN: jax.Array, dtype: jnp.dtype) -> jax.Array:
    is_fp8 = matrix_KN.dtype == jnp.float8_e4m3fn
    return bfloat16_of_fp8(matrix_KN).astype(dtype) if is_fp8 else matrix_KN.astype(dtype)


def bfloat16_of_fp8(matrix_KN: jax.Array) -> jax.Array:
    """The same numbers by operations on pairs of rows: chips without a conversion of e4m3 have a slow one. No NaNs.

    Four bits of exponent and three of mantissa are moved to where bfloat16 has them. A number below the normal ones has
    then 2**-7 and half of what it is, and the least of that and of twice that less 2**-6 is right for any number.
    """
    bits_KN = pltpu.bitcast(matrix_KN, jnp.int8).astype(jnp.int16)
    pairs = pltpu.bitcast(bits_KN, jnp.uint32)
    moved = ((pairs << 4) & jnp.uint32(0x07F007F0)) + jnp.uint32(0x3C003C00)
    magnitude = pltpu.bitcast(moved, jnp.bfloat16)
    magnitude = jnp.minimum(magnitude, magnitude + magnitude - jnp.bfloat16(2**-6))
    signed = pltpu.bitcast(magnitude, jnp.uint32) | (pairs & jnp.uint32(0x80008000))
    return pltpu.bitcast(signed, jnp.bfloat16)
