"""Whether all values of an array of weights are finite, in two sweeps over its bits that allocate nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np

INFINITIES = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, np.uint16, 0x7F80, 0xFF80),
    np.dtype(np.float16): (np.int16, np.uint16, 0x7C00, 0xFC00),
    np.dtype(np.float32): (np.int32, np.uint32, 0x7F800000, 0xFF800000),
}
"""By dtype: its bits as signed and as unsigned integers, and those of plus and of minus infinity.

Signed, the largest is the largest positive value; unsigned, the largest negative one. NaNs lie beyond the infinities.
"""


def is_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; `values` of a dtype in INFINITIES, of any shape."""
    if values.size == 0:
        return True
    signed, unsigned, plus, minus = INFINITIES[values.dtype]
    return bool(values.view(signed).max() < plus and (values.view(unsigned).max() < minus))
