"""The kernel that reads the projections itself gives what the reference gives, on one core and on two."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights, project_packed_rows
from rayserve_moe.kernels.reference.layers import rms_norm, rotation_of
from rayserve_moe.kernels.tpu import streamed_heads
from rayserve_moe.kernels.tpu.streamed_heads import project_streamed, stream_shape, unsupported_shape

LAYERS, LAYER, WIDTH, HEADS, KV_HEADS, EPS = 3, 2, 32, 6, 2, 1e-6
SHAPES = {
    "q_LDH": (LAYERS, WIDTH, HEADS * 128),
    "k_LDG": (LAYERS, WIDTH, KV_HEADS * 128),
    "v_LDG": (LAYERS, WIDTH, KV_HEADS * 128),
    "q_norm_Lh": (LAYERS, 128),
    "k_norm_Lh": (LAYERS, 128),
    "norm_LD": (LAYERS, WIDTH),
}


def streamed_and_expected(num_tokens: int, num_cores: int, dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(num_tokens)
    weights = {name: jnp.asarray(generator.standard_normal(shape), dtype) for name, shape in SHAPES.items()}
    hidden, added = (jnp.asarray(generator.standard_normal((num_tokens, WIDTH)), dtype) for _ in range(2))
    rotation = rotation_of(jnp.arange(num_tokens), np.float32(1e4) ** (-np.arange(64, dtype=np.float32) / 64))
    shape = stream_shape(num_tokens, weights, num_cores=num_cores)
    found = project_streamed(
        hidden,
        added,
        StackedWeights(weights, jnp.int32(LAYER)),
        rotation,
        shape=replace(shape, block_heads=1),
        eps=EPS,
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    of_layer = {name: array[LAYER] for name, array in weights.items()}
    total = hidden + added
    normed = rms_norm(total, of_layer["norm_LD"], EPS)
    projected = project_packed_rows(normed, of_layer, rotation=rotation, config=AttentionConfig(128, EPS))
    return [
        tuple(np.asarray(each, np.float32) for each in pair) for pair in zip(found, (total, *projected), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tokens", "num_cores", "dtype"),
    [(2, 1, "float32"), (5, 2, "float32"), (8, 1, "bfloat16"), (17, 2, "bfloat16")],
)
def test_streamed_heads_are_those_of_the_reference(num_tokens, num_cores, dtype):
    """In bfloat16 nearly to the bit: both round at the same places what is summed in other orders."""
    for found, expected in streamed_and_expected(num_tokens, num_cores, dtype):
        bound = 2e-6 if dtype == "float32" else 2**-7
        np.testing.assert_allclose(found, expected, rtol=bound, atol=bound)
    assert not interpret_pallas_call.races.races_found


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no wait", "one buffer"])
def test_a_planted_fault_is_found(fault, monkeypatch):
    """Weights that have not arrived are NaN, and a block that comes into the one in use races with it."""
    copy = streamed_heads._Stream.copy

    class NoWait:
        def __init__(self, started) -> None:
            self.start, self.wait = started.start, lambda: None

    def wrong(stream, matrix, first_head, num_heads, half):
        return (
            NoWait(copy(stream, matrix, first_head, num_heads, half))
            if fault == "no wait"
            else copy(stream, matrix, first_head, num_heads, 0)
        )

    monkeypatch.setattr(streamed_heads._Stream, "copy", wrong)
    try:
        pairs = streamed_and_expected(2, 1, "float32")
    except Exception:  # noqa: BLE001 (whatever the interpreter raises is the outcome)
        return
    is_wrong = any(not np.allclose(found, expected, rtol=1e-4, atol=1e-4) for found, expected in pairs)
    assert is_wrong or interpret_pallas_call.races.races_found


def test_what_does_not_fit_is_left_to_others():
    """Heads that cores cannot share, and keys that are too many for a buffer."""
    weights = {"q_LDH": jnp.zeros((1, 8, 6 * 128)), "k_LDG": jnp.zeros((1, 8, 3 * 128))}
    assert unsupported_shape(weights, num_cores=2) == "6 query heads and 3 KV heads do not divide over 2 cores"
    assert not unsupported_shape(weights, num_cores=3)
    shape = stream_shape(2, weights, num_cores=3)
    assert (shape.num_heads, shape.num_kv, shape.num_blocks) == (2, 1, 1)
    wide = {"q_LDH": jnp.zeros((1, 4096, 128), jnp.bfloat16), "k_LDG": jnp.zeros((1, 4096, 9 * 128), jnp.bfloat16)}
    assert unsupported_shape(wide, num_cores=1) == "the columns of a buffer take 9 of 8 MiB"
