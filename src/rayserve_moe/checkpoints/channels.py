"""Matrices in 8 bits: one scale per column, which is a channel of a product's output.

A column is quantised by itself and from its own values alone, so what comes out does not depend on how a tensor is cut
into parts, on who holds it, or on how often it is read.
"""

# I rows, over which a product adds up   O columns

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayserve_moe.checkpoints.casting import cast

LARGEST = 127
"""The same to both sides of zero."""


class QuantizedColumns(NamedTuple):
    """Integers of -127 to 127, int8 [I, O], and what each column of them is multiplied by, float32 [O]."""

    values_IO: np.ndarray
    scales_O: np.ndarray


def quantize_columns(values_IO: np.ndarray) -> QuantizedColumns:
    """Round finite floating values to whole multiples of 1/127 of the largest of their column, ties to even.

    The error is at most half of the column's scale. A column without anything but zeros has scale 0.
    """
    wide_IO = cast(values_IO, np.dtype(np.float32))
    scales_O = np.max(np.abs(wide_IO), axis=0) / np.float32(LARGEST)
    steps_IO = wide_IO / np.where(scales_O > 0, scales_O, np.float32(1))
    np.clip(np.rint(steps_IO, out=steps_IO), -LARGEST, LARGEST, out=steps_IO)
    return QuantizedColumns(steps_IO.astype(np.int8), scales_O)
