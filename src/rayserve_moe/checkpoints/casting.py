"""Casts between the dtypes of weights, by integer operations that release the interpreter lock.

numpy copies and casts foreign dtypes, such as bfloat16, value by value, and holds the interpreter lock meanwhile.
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
"""By dtype: its bits' signed and unsigned integer types, and the bits of plus and minus infinity.

As signed integers, positive values sort below plus infinity; as unsigned integers, negative values sort below minus
infinity. NaNs are beyond the infinities.
"""
_AS_INTEGERS = {2: np.uint16, 4: np.uint32}


def assign(target: np.ndarray, values: np.ndarray) -> None:
    """Compute `target[...] = values` with a cast to the target's dtype; both have a dtype of weights."""
    if values.dtype != target.dtype:
        values = cast(values, target.dtype)
    unsigned = _AS_INTEGERS[target.itemsize]
    target.view(unsigned)[...] = values.view(unsigned)


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return finite values in float32 or bfloat16, rounded to nearest, ties to even."""
    if values.dtype == dtype:
        return values
    wide = _widened(values)
    return _narrowed(wide) if dtype == BFLOAT16 else wide.astype(dtype, copy=False)


def is_finite(values: np.ndarray) -> bool:
    """Return True if no value is NaN or infinite, for a dtype in INFINITIES. Scans the bits twice without a copy."""
    if values.size == 0:
        return True
    signed, unsigned, plus, minus = INFINITIES[values.dtype]
    return bool(values.view(signed).max() < plus and (values.view(unsigned).max() < minus))


def _widened(values: np.ndarray) -> np.ndarray:
    """Return bfloat16, float16 or float32 values as float32, exactly."""
    if values.dtype != BFLOAT16:
        return values.astype(np.float32, copy=False)
    bits = values.view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _narrowed(values: np.ndarray) -> np.ndarray:
    """Return float32 values as bfloat16: the upper half of the bits, after rounding by half of its last place."""
    bits = values.view(np.uint32)
    rounding = bits >> 16
    rounding &= 1
    rounding += 0x7FFF
    rounding += bits
    rounding >>= 16
    return rounding.astype(np.uint16).view(BFLOAT16)
