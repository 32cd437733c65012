"""The operations of `tpu_invariant` give a row the same bits in a step of any size; kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.invariant import TPU_ROWS_PER_BLOCK, in_tpu_blocks
from rayserve_moe.kernels.reference.layers import Rotation, rotation_of
from rayserve_moe.kernels.table import TPU_INVARIANT
from rayserve_moe.kernels.tpu.add_norm import add_and_norm
from rayserve_moe.kernels.tpu.rotary_heads import project_rows_at_once

WIDTH, HEADS, KV_HEADS, EXPERTS, WORDS = 256, 3, 2, 16, 640
SIZES = (1, 7, 64, 100, TPU_ROWS_PER_BLOCK, 300, 1024)
NUM_ROWS = 5
"""Number of last rows of each step that are compared."""
GENERATOR = np.random.default_rng(8)


def drawn(*shape: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(GENERATOR.standard_normal(shape) / 8, dtype)


HIDDEN, ADDED = drawn(max(SIZES), WIDTH), drawn(max(SIZES), WIDTH)
LOGITS = drawn(max(SIZES), WORDS, dtype=jnp.float32) * 40
ROTATION = rotation_of(jnp.arange(max(SIZES)), np.float32(1e4) ** (-np.arange(64, dtype=np.float32) / 64))
HEADS_OF = {
    "q_LDH": drawn(WIDTH, HEADS * 128),
    "k_LDG": drawn(WIDTH, KV_HEADS * 128),
    "v_LDG": drawn(WIDTH, KV_HEADS * 128),
    "q_norm_Lh": drawn(128),
    "k_norm_Lh": drawn(128),
}
SCALES, ROUTER, HEAD = drawn(2, WIDTH), drawn(WIDTH, EXPERTS, dtype=jnp.float32), drawn(WORDS, WIDTH)
MATRICES = drawn(1, WIDTH, 128), drawn(1, WIDTH, 128), drawn(1, 128, WIDTH)


def project(rows: slice) -> tuple[jax.Array, jax.Array]:
    """Queries, keys and values in the blocks of `attend_layer`."""
    of_block = partial(project_rows_at_once, config=AttentionConfig(128, 1e-6), interpret=True)

    def compute(part: tuple[jax.Array, Rotation]) -> tuple[jax.Array, jax.Array]:
        return of_block(part[0], HEADS_OF, rotation=part[1])

    return in_tpu_blocks(compute, (HIDDEN[rows], Rotation(*(angles[rows] for angles in ROTATION))))


OPERATIONS: dict[str, Callable[[slice], object]] = {
    "sum and norm": lambda rows: add_and_norm(
        HIDDEN[rows], ADDED[rows], SCALES, layer=jnp.int32(1), eps=1e-6, interpret=True
    ),
    "norm": lambda rows: TPU_INVARIANT.norm(HIDDEN[rows], SCALES[0], 1e-6),
    "heads": project,
    "mlp": lambda rows: TPU_INVARIANT.mlp(HIDDEN[rows], MATRICES, layer=jnp.int32(0)),
    "router": lambda rows: TPU_INVARIANT.experts.router_scores(HIDDEN[rows], ROUTER),
    "head": lambda rows: TPU_INVARIANT.head.logits(HIDDEN[rows], HEAD),
    "masses": lambda rows: TPU_INVARIANT.sampling.masses(
        LOGITS[rows], jnp.ones(len(LOGITS[rows])), jnp.int32(WORDS - 9)
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_has_the_same_bits_in_a_step_of_any_size(name: str):
    compute = OPERATIONS[name]

    def last_rows(size: int) -> list[np.ndarray]:
        made = jax.jit(
            lambda: compute(slice(max(SIZES) - size, None)), compiler_options=TPU_INVARIANT.compiler_options
        )()
        return [np.asarray(array)[-min(size, NUM_ROWS) :] for array in jax.tree.leaves(made)]

    expected = last_rows(max(SIZES))
    for size in SIZES:
        for found, wanted in zip(last_rows(size), expected, strict=True):
            np.testing.assert_array_equal(found, wanted[-len(found) :])
