"""Rows of the pool in 8 bits: two numbers in an int16, so that rows are written like rows of 16 bits.

No core addresses single rows of 8 bits. A row of X lanes takes X / 2 elements. Lanes are paired by whole registers: of
two neighbouring registers, the first has the low bytes and the second the high bytes. Heads of 128 have keys in low
bytes and values in high bytes.

    8 bits    | K0 | V0 | K1 | V1 |          in 16 bits    | V0 K0 | V1 K1 |

Numbers are float8_e4m3fn. Cores before tpu7x convert e4m3b11fnuz instead, in which the same bits stand for a
16th of a number, and the bits of a negative zero for NaN: there a negative zero is stored as zero, and NaN as its bits.
"""

# T tokens   X lanes of a row in 8 bits   G rows   S keys of a block

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.kv_pool import PAIRED, clipped
from rayserve_moe.kernels.tpu.packed_rows import LANES

HELD = np.dtype(PAIRED)
UNIT = 16.0
"""Factor from e4m3b11fnuz to the e4m3fn of the same bits."""
FIRST_WITH_E4M3 = 7
"""The generation of TPUs from which on cores convert e4m3fn."""
NAN, NEGATIVE_ZERO = 0x7F, 0x80
"""Bits of NaN in e4m3fn without its sign, and of a negative zero, which is the NaN of e4m3b11fnuz."""


def has_e4m3() -> bool:
    """Return True if the cores that are compiled for convert e4m3fn."""
    return pltpu.is_tpu_device() and pltpu.get_tpu_info().generation >= FIRST_WITH_E4M3


def nan_bits() -> int:
    """Return the byte that is stored for NaN."""
    return NAN if has_e4m3() else NEGATIVE_ZERO


def is_nan(bits: jax.Array) -> jax.Array:
    """Return True for bytes, in int32, that stand for NaN."""
    return bits & NAN == NAN if has_e4m3() else bits == NEGATIVE_ZERO


def is_paired(dtype: jnp.dtype) -> bool:
    """Return True for the dtype of pools with two numbers in an element."""
    return jnp.dtype(dtype) == HELD


def lanes_in_8_bits(pool: jax.Array) -> int:
    """Return the lanes of a row of a pool [N, page, lanes], before they are paired if they are."""
    return pool.shape[2] * (2 if is_paired(pool.dtype) else 1)


def paired_rows(rows_TX: jax.Array) -> jax.Array:
    """Return rows rounded to e4m3, with numbers beyond its range cut off, in pairs: int16 [T, X / 2]."""
    narrow_TX = clipped(rows_TX, jnp.float8_e4m3fn).astype(jnp.float8_e4m3fn)
    bytes_TX = jax.lax.bitcast_convert_type(narrow_TX, jnp.uint8).astype(jnp.int32)
    if not has_e4m3():
        bytes_TX = jnp.where(bytes_TX == NEGATIVE_ZERO, 0, bytes_TX)
        bytes_TX = jnp.where(bytes_TX & NAN == NAN, NEGATIVE_ZERO, bytes_TX)
    pairs = bytes_TX.reshape(len(rows_TX), -1, 2, LANES)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 8)).astype(HELD).reshape(len(rows_TX), -1)


def product_dtype(pool: jax.Array, queries: jax.Array) -> jnp.dtype:
    """Return the dtype of products with keys and values: the dtype of the pool, or of queries if the pool has pairs."""
    return queries.dtype if is_paired(pool.dtype) else pool.dtype


def rows_to_write(rows_TX: jax.Array, pool: jax.Array) -> jax.Array:
    """Return new rows as a kernel takes them: in the dtype of the pool, but pairs as float32 integers."""
    return rows_TX.astype(jnp.float32 if is_paired(pool.dtype) else pool.dtype)


def unit_of(dtype: jnp.dtype) -> float:
    """Return the number over its value in `lanes_of_block`: a power of two, so that results may be multiplied by it."""
    return UNIT if is_paired(dtype) and not has_e4m3() else 1.0


def lanes_of_block(block_SX: Any, lanes: slice, dtype: jnp.dtype) -> jax.Array:
    """Return lanes of a block of keys in `dtype`, inside a kernel; numbers of pairs are divided by `unit_of`."""
    if not is_paired(block_SX.dtype):
        return block_SX[:, lanes].astype(dtype)
    parts = []
    for register in range(lanes.start // LANES, lanes.stop // LANES):
        first = register // 2 * LANES
        parts.append(_decoded(block_SX[:, first : first + LANES], is_high=register % 2 == 1).astype(dtype))
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def _decoded(pairs: jax.Array, *, is_high: bool) -> jax.Array:
    """Return the float32 numbers of the low or the high bytes of pairs, divided by `unit_of`.

    Viewed as 8 bits, a register of pairs alternates between rows of low and of high bytes. Their bfloat16 numbers,
    which an instruction converts, then are the two halves of words, and a bfloat16 is the upper half of a float32.
    """
    dtype = jnp.float8_e4m3fn if has_e4m3() else jnp.float8_e4m3b11fnuz
    words = pltpu.bitcast(pltpu.bitcast(pairs, dtype).astype(jnp.bfloat16), jnp.int32)
    bits = words & -65536 if is_high else words << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def widened(rows: jax.Array) -> jax.Array:
    """Return rows of the pool in float32, inside a kernel: numbers, or exactly the integers of pairs."""
    return rows.astype(jnp.int32).astype(jnp.float32) if is_paired(rows.dtype) else rows.astype(jnp.float32)


def narrowed(wide: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Undo `widened`."""
    return wide.astype(jnp.int32).astype(dtype) if is_paired(dtype) else wide.astype(dtype)


def as_pairs(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return the pairs of bytes in int32, as `widened` has them: float32."""
    return (low | (high << 8)).astype(jnp.float32)
