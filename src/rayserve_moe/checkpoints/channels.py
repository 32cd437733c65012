"""Matrices in 8 bits: one scale per column, which is a channel of a product's output, or one per square block.

A column, or a block, is quantised by itself and from its own values alone, so what comes out does not depend on how a
tensor is cut into parts, on who holds it, or on how often it is read.
"""

# I rows, over which a product adds up   O columns   Z blocks of rows

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayserve_moe.checkpoints.casting import cast
from rayserve_moe.model.param_spec import LARGEST_OF

FP8_ROUNDING, FP8_BIAS, FP8_STEP = 20, 120 << 3, np.float32(2.0**-9)
"""Bits of a float32 that e4m3 has not; what its exponents are less, in its last place; its least number."""


class QuantizedColumns(NamedTuple):
    """Numbers of 8 bits, int8 [I, O] (bits of e4m3 as such), and what they are multiplied by, float32 [Z, O].

    Z is 1, or the number of blocks of rows.
    """

    values_IO: np.ndarray
    scales_ZO: np.ndarray


def quantize_columns(
    values_IO: np.ndarray, dtype: str = "int8", *, block: int = 0, scales_ZO: np.ndarray | None = None
) -> QuantizedColumns:
    """Round finite floating values to what `dtype` has of the largest of their column, ties to even.

    With a `block` the largest is that of a square of so many rows and columns, unless `scales_ZO` are given: those that
    values were multiplied by brings the numbers back that were. In int8 the error is at most half of the scale, in e4m3
    a sixteenth of the number, or 2**-10 of the scale where that is more. What is zeros alone has scale 0.
    """
    wide_IO = cast(values_IO, np.dtype(np.float32))
    if scales_ZO is None:
        scales_ZO = _largest(wide_IO, block) / np.float32(LARGEST_OF[dtype])
    divisors = np.where(scales_ZO > 0, scales_ZO, np.float32(1))
    steps_IO = wide_IO / (np.repeat(divisors, block, axis=0)[: len(wide_IO)] if block else divisors)
    np.clip(steps_IO, -LARGEST_OF[dtype], LARGEST_OF[dtype], out=steps_IO)
    values = _fp8_bits(steps_IO) if dtype == "float8_e4m3fn" else np.rint(steps_IO, out=steps_IO).astype(np.int8)
    return QuantizedColumns(values, scales_ZO)


def _largest(values_IO: np.ndarray, block: int) -> np.ndarray:
    """The largest magnitude of each column, [1, O], or of the block that a column is in, [Z, O]."""
    largest_IO = np.abs(values_IO)
    if not block or not values_IO.size:
        return np.max(largest_IO, axis=0, keepdims=True, initial=0)
    rows, columns = (np.arange(0, size, block) for size in values_IO.shape)
    largest = np.maximum.reduceat(np.maximum.reduceat(largest_IO, rows, axis=0), columns, axis=1)
    return np.repeat(largest, block, axis=1)[:, : values_IO.shape[1]]


def _fp8_bits(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values of at most 448 in e4m3, rounded to nearest, ties to even, as int8.

    Zeros have no sign: TPUs before tpu7x have a NaN in the place of one with a sign (`kernels.narrow_weights`). By
    integer operations, as in `casting`: a cast of ml_dtypes holds the interpreter lock.
    """
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    code = ((magnitude >> FP8_ROUNDING) & 1) + np.uint32((1 << (FP8_ROUNDING - 1)) - 1)
    code += magnitude
    code >>= FP8_ROUNDING
    code -= np.uint32(FP8_BIAS)
    # Below the normal numbers steps are even, and 8 of them are the code of the least normal one.
    small = magnitude.view(np.float32) < np.float32(2.0**-6)
    if small.any():
        code[small] = np.rint(magnitude.view(np.float32)[small] / FP8_STEP).astype(np.uint32)
    code |= ((bits >> 24) & np.uint32(0x80)) * (code > 0)
    return code.astype(np.uint8).view(np.int8)
