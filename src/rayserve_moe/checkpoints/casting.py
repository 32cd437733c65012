"""Casts between the dtypes of weights, by integer operations that let other threads run.

numpy copies and casts dtypes that are not its own, such as bfloat16, value by value, and holds the interpreter lock.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INFINITIES = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, np.uint16, 0x7F80, 0xFF80),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00, 0xFC00),
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F800000, 0xFF800000),
}
"""By dtype: its bits as signed and as unsigned integers, and those of plus and of minus infinity.

Signed, the largest is the largest positive value; unsigned, the largest negative one. NaNs lie beyond the infinities.
"""
_AS_INTEGERS = {2: np.uint16, 4: np.uint32}


def assign(target: np.ndarray, values: np.ndarray) -> None:
    """`target[...] = values`, cast to its dtype; both of a dtype that weights have."""
    if values.dtype != target.dtype:
        values = cast(values, target.dtype)
    unsigned = _AS_INTEGERS[target.itemsize]
    target.view(unsigned)[...] = values.view(unsigned)


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values in float32 or bfloat16, rounded to nearest, ties to even; finite values alone are rounded so."""
    if values.dtype == dtype:
        return values
    wide = _widened(values)
    return _narrowed(wide) if dtype == BFLOAT16 else wide.astype(dtype, copy=False)


def is_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; `values` of a dtype in INFINITIES. Two sweeps over its bits, no copy."""
    if values.size == 0:
        return True
    signed, unsigned, plus, minus = INFINITIES[values.dtype]
    return bool(values.view(signed).max() < plus and (values.view(unsigned).max() < minus))


def _widened(values: np.ndarray) -> np.ndarray:
    """float32 of bfloat16, float16 or float32: exact."""
    if values.dtype != BFLOAT16:
        return values.astype(np.float32, copy=False)
    bits = values.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _narrowed(values: np.ndarray) -> np.ndarray:
    """bfloat16 of float32: the upper half of the bits, after adding half of its last place."""
    bits = values.view(np.uint32)
    rounding = bits >> 16
    rounding &= 1
    rounding += 0x7FFF
    rounding += bits
    rounding >>= 16
    return rounding.astype(np.uint16).view(BFLOAT16)
