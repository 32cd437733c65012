"""The kernel of queries and keys gives what the reference gives, and leaves what it does not know to it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights, project_packed_rows
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import PAGED
from rayserve_moe.kernels.tpu.rotary_heads import MAX_ELEMENTS, project_rows_at_once, tile_tokens, unsupported_reason

WIDTH, HEADS, KV_HEADS, PLAIN = 32, 3, 2, AttentionConfig(128, 1e-6)
SHAPES = {
    "q_LDH": (WIDTH, HEADS * 128),
    "k_LDG": (WIDTH, KV_HEADS * 128),
    "v_LDG": (WIDTH, KV_HEADS * 128),
    "q_norm_Lh": (128,),
    "k_norm_Lh": (128,),
    "k_bias_LG": (KV_HEADS * 128,),
}
MANY = MAX_ELEMENTS // ((HEADS + 2 * KV_HEADS) * 128) + 20
"""Tokens of several tiles, the last of which is part of one."""
ROTATION = rotation_of(jnp.arange(MANY), np.float32(1e4) ** (-np.arange(64, dtype=np.float32) / 64))


def heads_by(project, num_tokens: int, config: AttentionConfig, *without: str, **options) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    drawn = {name: jnp.asarray(generator.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}
    weights = {name: array for name, array in drawn.items() if name not in without}
    normed, rotation = jnp.asarray(generator.standard_normal((MANY, WIDTH)), jnp.float32), ROTATION

    def run(normed: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = type(rotation)(*(angles[:num_tokens] for angles in rotation))
        return project(normed[:num_tokens], weights, rotation=turned, config=config, **options)

    return [np.asarray(part) for part in jax.jit(run)(normed)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_tokens", [MANY, 8, 5, 2])
def test_every_head_is_normed_and_turned_and_lies_as_in_the_pool(num_tokens):
    found = heads_by(project_rows_at_once, num_tokens, PLAIN, "k_bias_LG", interpret=True)
    for part, expected in zip(found, heads_by(project_packed_rows, num_tokens, PLAIN, "k_bias_LG"), strict=True):
        assert part.shape == expected.shape
        np.testing.assert_allclose(part, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "without", "reason"),
    [
        pytest.param(PLAIN, (), "projections have biases", id="bias"),
        pytest.param(PLAIN, ("k_bias_LG", "q_norm_Lh", "k_norm_Lh"), "heads have no norm each", id="no norm"),
        pytest.param(PLAIN, ("k_bias_LG", "v_LDG"), "values are keys, or normed", id="keys as values"),
        pytest.param(
            replace(PLAIN, norms_values=True), ("k_bias_LG",), "values are keys, or normed", id="normed values"
        ),
        pytest.param(replace(PLAIN, clip=0.5), ("k_bias_LG",), "values are clipped", id="clip"),
        pytest.param(
            replace(PLAIN, interleaved_rotation=True), ("k_bias_LG",), "neighbouring elements rotate", id="pairs"
        ),
        pytest.param(
            replace(PLAIN, norms_after_rotation=True), ("k_bias_LG",), "norms follow the rotation", id="late norms"
        ),
    ],
)
def test_unknown_knobs_are_reasons_for_the_reference(config, without, reason):
    """Not interpreted: the kernel would not run here."""
    weights = dict.fromkeys({*SHAPES} - {*without}, jnp.zeros(0))
    assert reason in unsupported_reason(jnp.zeros((8, WIDTH)), weights, rotation=ROTATION, config=config)
    found = heads_by(PAGED.project, 8, config, *without)
    for part, expected in zip(found, heads_by(project_packed_rows, 8, config, *without), strict=True):
        np.testing.assert_array_equal(part, expected)


def test_the_norms_of_a_layer_are_read_where_they_lie():
    stacked = {
        name: jnp.asarray(np.random.default_rng(1).standard_normal((3, 128)), jnp.float32)
        for name in ("q_norm_Lh", "k_norm_Lh")
    }
    normed = jnp.ones((8, WIDTH), jnp.float32)
    matrices = {name: jnp.ones(SHAPES[name], jnp.float32) for name in ("q_LDH", "k_LDG", "v_LDG")}
    of_layer = matrices | {name: array[2] for name, array in stacked.items()}
    how = {"rotation": type(ROTATION)(*(angles[:8] for angles in ROTATION)), "config": PLAIN}
    found = project_rows_at_once(normed, of_layer, **how, stacked=StackedWeights(stacked, jnp.int32(2)), interpret=True)
    for part, expected in zip(found, project_packed_rows(normed, of_layer, **how), strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-6, atol=1e-6)


def test_few_tokens_are_one_tile_and_many_are_tiles_of_whole_registers():
    for num_elements in (128 * 3, 128 * 40, 128 * 72, 128 * 700):
        few = MAX_ELEMENTS // num_elements
        assert tile_tokens(few, num_elements) == few
        assert tile_tokens(few + 1, num_elements) <= few + 1
        assert tile_tokens(8208, num_elements) % 16 == 0
