"""The kernel of a residual stream and its norm gives what the reference gives, of every layer."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.reference.layers import rms_norm
from rayserve_moe.kernels.table import TPU
from rayserve_moe.kernels.tpu.add_norm import SCALE_ROWS, add_and_norm, tile_tokens, unsupported_reason

WIDTH, LAYERS = 128, SCALE_ROWS + 3
GENERATOR = np.random.default_rng(5)
HIDDEN, ADDED = GENERATOR.standard_normal((2, 6, WIDTH)).astype(np.float32)
SCALES = GENERATOR.standard_normal((LAYERS, WIDTH)).astype(np.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_it_is_the_sum_and_its_norm(dtype, layer):
    hidden, added, scales = (jnp.asarray(array, dtype) for array in (HIDDEN, ADDED, SCALES))
    kernel = jax.jit(partial(add_and_norm, eps=1e-6, interpret=True))
    total, normed = kernel(hidden, added, scales, layer=jnp.int32(layer))
    expected = hidden + added
    np.testing.assert_array_equal(total, expected)
    # Only the order of the mean's sum is open: one step of the dtype.
    np.testing.assert_allclose(
        np.asarray(normed, np.float64),
        np.asarray(rms_norm(expected, scales[layer], 1e-6), np.float64),
        rtol=float(jnp.finfo(dtype).eps),
    )


def test_a_norm_is_not_rounded_ahead_of_float32_scales():
    """Their products with rounded norms would be other numbers."""
    hidden, added = (jnp.asarray(array, jnp.bfloat16) for array in (HIDDEN, ADDED))
    kernel = jax.jit(partial(add_and_norm, eps=1e-6, interpret=True))
    _, found = kernel(hidden, added, jnp.asarray(SCALES), layer=jnp.int32(1))
    wanted, rounded = (
        np.asarray(rms_norm(hidden + added, jnp.asarray(SCALES[1], dtype), 1e-6), np.float32)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert (np.asarray(found, np.float32) != wanted).mean() < 0.01 < (rounded != wanted).mean()


def test_tiles_of_many_tokens_are_those_of_few():
    """To the bit: tiles are computed by the same program. The last one is part of a tile."""
    tile = tile_tokens(1 << 14, WIDTH)
    hidden, added = (
        jnp.asarray(np.random.default_rng(seed).standard_normal((2 * tile + 20, WIDTH)), jnp.float32) for seed in (1, 2)
    )
    kernel = jax.jit(partial(add_and_norm, scale_LD=jnp.asarray(SCALES), layer=jnp.int32(1), eps=1e-6, interpret=True))
    whole = kernel(hidden, added)
    for first in (0, tile, tile + 20):
        rows = slice(first, first + tile)
        for found, wanted in zip(kernel(hidden[rows], added[rows]), whole, strict=True):
            np.testing.assert_array_equal(found, wanted[rows])


def test_many_tokens_are_left_to_xla():
    hidden = jax.ShapeDtypeStruct((1 << 14, WIDTH), jnp.bfloat16)
    reason = unsupported_reason(hidden, hidden, jnp.asarray(SCALES), layer=jnp.int32(0), eps=1e-6)
    assert reason == f"16384 tokens of width {WIDTH} exceed 1048576 elements"
    choice = TPU.add_norm.choose(hidden, hidden, jnp.asarray(SCALES), layer=jnp.int32(0), eps=1e-6)
    assert str(choice) == f"xla (add_norm: {reason})"
