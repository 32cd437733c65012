"""Pairs of 8 bits are the numbers of e4m3, every one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from rayserve_moe.kernels.tpu import byte_pairs
from rayserve_moe.kernels.tpu.byte_pairs import (
    as_pairs,
    lanes_of_block,
    narrowed,
    paired_rows,
    rows_to_write,
    widened,
)

ALL = np.arange(256, dtype=np.uint8)


def lanes_by_kernel(pairs: jax.Array, lanes: slice, dtype: str) -> np.ndarray:
    """Return the numbers that a kernel reads of a block."""
    shape = jax.ShapeDtypeStruct((len(pairs), lanes.stop - lanes.start), dtype)

    def body(block, out):
        out[...] = lanes_of_block(block, lanes, dtype)

    read = np.asarray(pl.pallas_call(body, out_shape=shape, interpret=True)(pairs), np.float32)
    return read * byte_pairs.unit_of(pairs.dtype)


@pytest.mark.parametrize("is_native", [False, True])
def test_every_number_is_stored_and_read(is_native, monkeypatch):
    """NaN and zeros as well, on cores that convert e4m3 and on others."""
    monkeypatch.setattr(byte_pairs, "has_e4m3", lambda: is_native)
    numbers = jax.lax.bitcast_convert_type(jnp.asarray(np.resize(ALL, (16, 256))), jnp.float8_e4m3fn)
    pairs = paired_rows(numbers.astype(jnp.float32))
    for lanes in (slice(0, 128), slice(128, 256)):
        expected = np.asarray(numbers.astype(jnp.float32))[:, lanes]
        np.testing.assert_array_equal(lanes_by_kernel(pairs, lanes, "float32"), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lanes_of_pairs_are_the_lanes_of_rows(dtype):
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((16, 1024)) * 100, dtype)
    rows = rows.at[3, 200].set(jnp.nan).at[5, 7].set(1e6)
    pairs = paired_rows(rows)
    assert pairs.shape == (16, 512) and pairs.dtype == jnp.int16
    expected = np.asarray(jnp.clip(rows, -448, 448).astype(jnp.float8_e4m3fn), np.float32)
    for lanes in (slice(0, 128), slice(128, 256), slice(256, 640), slice(0, 1024)):
        np.testing.assert_array_equal(lanes_by_kernel(pairs, lanes, dtype), expected[:, lanes])
        np.testing.assert_array_equal(lanes_by_kernel(rows, lanes, dtype), np.asarray(rows[:, lanes], np.float32))


def test_pairs_are_widened_and_narrowed_without_a_loss():
    low, high = (each.reshape(-1) for each in np.meshgrid(ALL.astype(np.int32), ALL.astype(np.int32)))
    pairs = (low | high << 8).astype(np.int16)
    np.testing.assert_array_equal(narrowed(widened(jnp.asarray(pairs)), jnp.int16), pairs)
    np.testing.assert_array_equal(narrowed(as_pairs(jnp.asarray(low), jnp.asarray(high)), jnp.int16), pairs)
    wide = rows_to_write(jnp.asarray(pairs), jnp.zeros((1, 16, 1), jnp.int16))
    np.testing.assert_array_equal(narrowed(wide, jnp.int16), pairs)
