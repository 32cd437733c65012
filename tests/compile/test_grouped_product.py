"""The grouped product of the experts is the compiler's own kernel, however many rows it gets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.expert_products import ExpertWeights, LayerExperts, ProductConfig, multiply_by_ragged_dot
from rayserve_moe.tools.hlo_report import kernels_of
from tests.compile.topologies import compile_for, text_of

SLOTS, WIDTH, INNER = 16, 2048, 768


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 161])
def test_any_number_of_rows_is_multiplied_by_the_kernel(num_tokens):
    up = jax.ShapeDtypeStruct((SLOTS, WIDTH, INNER), jnp.bfloat16)
    shapes = (
        jax.ShapeDtypeStruct((num_tokens, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_tokens, 6), np.int32),
        up,
        up,
        jax.ShapeDtypeStruct((SLOTS, INNER, WIDTH), jnp.bfloat16),
    )

    def multiply(rows, slots, *weights):
        experts = LayerExperts(ExpertWeights(*weights), 0, ProductConfig(SLOTS, 8.0))
        return multiply_by_ragged_dot(rows, slots, experts)

    compiled = compile_for("v6e", multiply, *shapes)
    assert kernels_of(text_of(compiled))["ragged-dot-none"] == 3
