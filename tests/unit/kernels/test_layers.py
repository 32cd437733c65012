"""The small pieces equal their definitions in float64."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.reference.activations import SILU, Activation
from rayserve_moe.kernels.reference.layers import gated_mlp, project, rms_norm, rotate, rotation_of
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.spec import RopeSpec
from tests.support.experts.expert_reference import activation_by_hand

GENERATOR_SEED = 6


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng([GENERATOR_SEED, *shape]).standard_normal(shape).astype(np.float32)


def test_rms_norm_divides_by_the_root_mean_square():
    hidden, scale = normal(5, 16) * 30, normal(16)
    wide = hidden.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(rms_norm(jnp.asarray(hidden), jnp.asarray(scale), 1e-6), expected, rtol=2e-5, atol=1e-6)


def test_rms_norm_of_zeros_is_zero():
    assert (np.asarray(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-6)) == 0).all()


def turn(heads: np.ndarray, positions: Sequence[int] | np.ndarray, theta: float) -> jax.Array:
    rotation = rotation_of(jnp.asarray(positions), rope_frequencies(RopeSpec(theta), heads.shape[-1]))
    return rotate(jnp.asarray(heads), rotation)


def test_rotation_turns_half_split_pairs_by_position_times_frequency():
    heads, positions, theta = normal(7, 3, 8), np.array([0, 1, 2, 50, 1000, 4095, -1]), 1e4
    found = np.asarray(turn(heads, positions, theta))
    pairs = heads[..., :4] + 1j * heads[..., 4:]
    angles = positions[:, None, None] * theta ** (-np.arange(4) / 4)
    turned = pairs * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    # float32 holds an angle of 4095 to about 2e-4.
    np.testing.assert_allclose(found, expected, atol=1e-3)
    np.testing.assert_allclose(found[:3], expected[:3], atol=1e-6)


@pytest.mark.parametrize("width", [8, 6, 2])
def test_interleaved_pairs_are_neighbours_and_what_lies_behind_the_rotated_part_stays(width):
    heads, positions, theta = normal(4, 3, 8), np.array([0, 1, 7, 50]), 1e4
    rotation = rotation_of(jnp.asarray(positions), rope_frequencies(RopeSpec(theta), width), factor=1.25)
    angles = positions[:, None, None] * theta ** (-np.arange(width // 2) / (width // 2))
    for interleaved in (False, True):
        found = np.asarray(rotate(jnp.asarray(heads), rotation, interleaved=interleaved))
        places = np.arange(width).reshape(-1, 2).T if interleaved else np.arange(width).reshape(2, -1)
        turned = (heads[..., places[0]] + 1j * heads[..., places[1]]) * np.exp(1j * angles) * 1.25
        expected = heads.copy()
        expected[..., places[0]], expected[..., places[1]] = turned.real, turned.imag
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_rotation_keeps_products_by_distance():
    query, key = normal(1, 1, 8), normal(1, 1, 8) + 1

    def product(query_position: int, key_position: int) -> float:
        turned_query = turn(query, [query_position], 1e4)
        turned_key = turn(key, [key_position], 1e4)
        return float(jnp.sum(turned_query * turned_key))

    assert abs(product(9, 4) - product(105, 100)) < 1e-4
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_project_multiplies_and_adds_the_bias():
    hidden, weight, bias = normal(4, 6), normal(6, 3), normal(3)
    found = project(jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(bias))
    np.testing.assert_allclose(found, hidden @ weight + bias, atol=1e-5)
    assert project(jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)).dtype == jnp.bfloat16


def stacked(array: np.ndarray) -> jax.Array:
    return jnp.asarray(array)[None]


@pytest.mark.parametrize(
    "activation",
    [SILU, Activation("clamped_swiglu", slope=1.3, limit=0.7), Activation("clipped_silu", limit=0.7)],
    ids=str,
)
def test_parts_of_a_gated_mlp_add_up_to_the_whole(activation):
    hidden, gate, up, down = normal(4, 6), normal(6, 10), normal(6, 10) * 2, normal(10, 6)
    rows, layer = hidden.astype(np.float64), jnp.int32(0)
    expected = activation_by_hand(rows @ gate, rows @ up, activation=activation) @ down
    parts = [
        gated_mlp(jnp.asarray(hidden), tuple(map(stacked, weights)), layer=layer, activation=activation)
        for part in (slice(0, 4), slice(4, 10))
        for weights in [(gate[:, part], up[:, part], down[part])]
    ]
    np.testing.assert_allclose(parts[0] + parts[1], expected, atol=1e-4)
