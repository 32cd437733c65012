"""Matrices in 8 bits and their scales, per column or per block of a column's rows.

Scales of columns multiply the product afterwards. Blocks of rows are scaled in float32 ahead of the product, which then
has the same operands as with a matrix in the dtype of the rows.

A product of two operands of 8 bits takes rows that are rounded to e4m3, with a scale each (`quantized_rows`). Its
matrix is not converted, and scales of blocks multiply the sums of their blocks.
"""

# M rows of the operand   K rows, over which a product adds up   N columns   Z blocks of rows with scales of their own

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SCALE_BLOCK = 128
"""Number of rows, and of columns, that share a scale in a matrix with scales of blocks."""
NARROW = ("int8", "float8_e4m3fn")
"""Dtypes of matrices with scales."""
_SUBLANES = 8
FIRST_WITH_E4M3 = 7
"""First generation of TPUs that converts and multiplies e4m3."""
E4M3_MAX = 448.0
"""Largest number of e4m3."""
_MIN_SCALED = 2.0**-100
"""Minimum of a row's largest magnitude for its scale, so that the scale of a row of zeros is a normal number."""


def scale_rows(num_rows: int) -> int:
    """Return the number of rows of block scales: a row per block, and zeros up to a multiple of eight.

    TPUs lay out arrays in rows of eight, and would copy arrays with other numbers of rows ahead of a kernel.
    """
    return -(-num_rows // (SCALE_BLOCK * _SUBLANES)) * _SUBLANES


def in_blocks(scales: jax.Array | None) -> bool:
    """Return True if scales [..., Z, N] belong to blocks of rows."""
    return scales is not None and scales.shape[-2] > 1


def dequantized(matrix_KN: jax.Array, scales_ZN: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the numbers of a matrix in blocks: scaled in float32, and rounded once to `dtype`, [..., K, N]."""
    scales = jnp.repeat(scales_ZN, SCALE_BLOCK, axis=-2)[..., : matrix_KN.shape[-2], :]
    return (matrix_KN.astype(jnp.float32) * scales).astype(dtype)


def quantized_rows(rows_MK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return rows in e4m3 and their scales, float32 [M, 1]: the largest magnitude of a row over 448.

    A number is off by at most 2**-4 of itself, or by 2**-10 of its row's scale if that is more.
    """
    wide_MK = rows_MK.astype(jnp.float32)
    largest_M1 = jnp.max(jnp.abs(wide_MK), axis=-1, keepdims=True)
    scales_M1 = jnp.maximum(largest_M1, _MIN_SCALED) * (1 / E4M3_MAX)
    return (wide_MK * (1.0 / scales_M1)).astype(jnp.float8_e4m3fn), scales_M1


def operand_of(rows_MK: jax.Array, *, narrows_rows: bool) -> tuple[jax.Array, jax.Array | None]:
    """Return the operand of `held_product`: rows, and the scales of rows if they are rounded to e4m3."""
    return quantized_rows(rows_MK) if narrows_rows else (rows_MK, None)


def held_product(
    operand: tuple[jax.Array, jax.Array | None], matrix_KN: jax.Array, scales_ZN: Any, *, first: jax.Array | int = 0
) -> jax.Array:
    """Multiply an operand by a matrix in a TPU kernel, and by the scales in a reference, if any: float32 [M, N].

    A matrix in blocks begins at block `first` of the scales.
    """
    rows_MK, row_scales_M1 = operand
    if row_scales_M1 is not None:
        return _product_of_8_bits(rows_MK, matrix_KN, scales_ZN, first=first) * row_scales_M1
    numbers_KN, unit = _converted_fast(matrix_KN)
    if scales_ZN is not None and in_blocks(scales_ZN):
        starts = range(0, matrix_KN.shape[0], SCALE_BLOCK)
        rows_of_scales = (scales_ZN[pl.ds(first + i, 1), :] * unit for i in range(len(starts)))
        blocks = (_float32_of(numbers_KN[k : k + SCALE_BLOCK]) for k in starts)
        scaled = ((block * row).astype(rows_MK.dtype) for block, row in zip(blocks, rows_of_scales, strict=True))
        return jnp.dot(rows_MK, jnp.concatenate([*scaled]), preferred_element_type=jnp.float32)
    sum_MN = jnp.dot(rows_MK, numbers_KN.astype(rows_MK.dtype), preferred_element_type=jnp.float32)
    return sum_MN if scales_ZN is None else sum_MN * (scales_ZN[...] * unit)


def _product_of_8_bits(
    rows_MK: jax.Array, matrix_KN: jax.Array, scales_ZN: Any, *, first: jax.Array | int
) -> jax.Array:
    """Multiply rows and a matrix, both in e4m3, without a conversion; scales of blocks multiply the sums of blocks."""
    if not in_blocks(scales_ZN):
        return jnp.dot(rows_MK, matrix_KN, preferred_element_type=jnp.float32) * scales_ZN[...]
    total_MN = jnp.zeros((rows_MK.shape[0], matrix_KN.shape[1]), jnp.float32)
    for number, k in enumerate(range(0, matrix_KN.shape[0], SCALE_BLOCK)):
        part = slice(k, k + SCALE_BLOCK)
        sums_MN = jnp.dot(rows_MK[:, part], matrix_KN[part], preferred_element_type=jnp.float32)
        total_MN += sums_MN * scales_ZN[pl.ds(first + number, 1), :]
    return total_MN


def _float32_of(numbers_KN: jax.Array) -> jax.Array:
    """Return the numbers as float32, integers by way of bfloat16, for which v6e has an instruction."""
    return (numbers_KN.astype(jnp.bfloat16) if numbers_KN.dtype == jnp.int8 else numbers_KN).astype(jnp.float32)


def _converted_fast(matrix_KN: jax.Array) -> tuple[jax.Array, float]:
    """Return a matrix in a dtype that the chip converts by an instruction, and the factor to its numbers.

    Chips before tpu7x have e4m3b11 and not e4m3. The same bits stand there for a 16th of the number, subnormal numbers
    included. The only exception is a negative zero, which no weight is. A conversion in software takes three times as
    long as the weights' transfer (v6e), or 14 times (tpu7x).
    """
    has_e4m3 = pltpu.is_tpu_device() and pltpu.get_tpu_info().generation >= FIRST_WITH_E4M3
    if matrix_KN.dtype != jnp.float8_e4m3fn or has_e4m3:
        return matrix_KN, 1.0
    return pltpu.bitcast(matrix_KN, jnp.float8_e4m3b11fnuz), 16.0
