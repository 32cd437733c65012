"""Blocks of Triton kernels: widths in powers of two, products of blocks, and rows at arbitrary places.

The kernels are written in Pallas for Triton (jax 0.10), whose arrays have sizes in powers of two and products of at
least 16 in each direction. Their functions take arrays and return arrays as the reference does, so that another
compiler of kernels can take Triton's place behind the same signature.
"""

# M rows   K inner width   N columns

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

MIN_SIZE = 16
"""Minimum size of a product of Triton in every direction."""
UNREACHABLE_BYTES = 2**31, 2**32
"""Size range (exclusive, inclusive) of 8-bit arrays whose elements beyond the first bound a kernel cannot address.

Pallas computes offsets in elements, of 32 bits with a sign, up to the second number of bytes (jax 0.10 and 0.11).
"""


def is_unreachable(array: jax.Array) -> bool:
    """Return True if offsets of a kernel do not reach the end of an array, or of its shape."""
    first, last = UNREACHABLE_BYTES
    return array.dtype.itemsize == 1 and first < math.prod(array.shape) <= last


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def largest_divisor(size: int, limit: int) -> int:
    """Return the largest power of two that divides `size` and is at most `limit`."""
    return min(size & -size, limit)


def parts_of(width: int) -> tuple[tuple[int, int], ...]:
    """Return start and size of the parts of a width, powers of two by descending size: 576 is 512 and 64.

    The last part is smaller than `MIN_SIZE` if the width is no multiple of it.
    """
    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))


def at_rows(ref: Any, rows_M: jax.Array, *middle: Any, first: Any, size: int) -> Any:
    """Return a reference [M, size] to elements from `first` on of rows at arbitrary places."""
    return ref.at[(rows_M[:, None], *middle, (first + jnp.arange(size))[None, :])]


def product(left_MK: jax.Array, right: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Multiply [M, K] by [K, N], or by [N, K] if `transposed`, accumulating in float32.

    Products of float32 are those of float32: by default they would be of TF32, which keeps 10 bits.
    """
    precision = jax.lax.Precision.HIGHEST if left_MK.dtype == jnp.float32 else None
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(left_MK, right, dims, precision=precision, preferred_element_type=jnp.float32)


def cdiv(number: int, size: int) -> int:
    """Return the number of blocks of `size` that hold `number`."""
    return pl.cdiv(number, size)
