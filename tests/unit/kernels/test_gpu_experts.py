"""The grouped products of GPUs, interpreted, give every row what its own expert makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.adapters import RowAdapters
from rayserve_moe.kernels.gpu import grouped_experts
from rayserve_moe.kernels.gpu.tile_order import TileOrder
from rayserve_moe.kernels.reference.activations import Activation
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_in_blocks,
)
from rayserve_moe.kernels.table import GPU
from tests.support.experts.quantized_experts import random_experts

SLOTS, LAYERS, WIDTH, INNER = 4, 2, 128, 96
SLOTS_OF_TOKENS = {
    "any, and elsewhere": np.random.default_rng(1).integers(0, SLOTS + 2, (50, 3)),
    "more than a tile of one": np.where(np.random.default_rng(2).random((90, 2)) < 0.9, 1, 3),
    "none of the first and the last": np.random.default_rng(3).integers(1, SLOTS - 1, (9, 2)),
    "one row": np.full((1, 1), 2),
    "all elsewhere": np.full((5, 2), SLOTS),
}
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}
"""Tolerance for results with a deviation of about 1; bfloat16 rounds inner rows of up to 8 to 8 bits."""


def experts_of(dtype: str, *, mean_rows: float = 8.0, has_bias: bool = False) -> LayerExperts:
    generator = np.random.default_rng(INNER)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(generator.standard_normal((LAYERS * SLOTS, *shape)) / 8, dtype)

    weights = ExpertWeights(drawn(WIDTH, INNER), drawn(WIDTH, INNER), drawn(INNER, WIDTH))
    if has_bias:
        weights = weights._replace(gate_bias_XF=drawn(INNER), up_bias_XF=drawn(INNER), down_bias_XD=drawn(WIDTH))
    return LayerExperts(weights, jnp.asarray(SLOTS, jnp.int32), ProductConfig(SLOTS, mean_rows))


def largest_difference(slots: np.ndarray, experts: LayerExperts, *, expected: LayerExperts | None = None) -> float:
    """Return the largest difference from the product in blocks, over local rows."""
    dtype = experts.weights.up_XDF.dtype
    dtype = jnp.float32 if dtype.itemsize == 1 else dtype
    hidden = jnp.asarray(np.random.default_rng(slots.size).standard_normal((len(slots), WIDTH)), dtype)
    slots_TK = jnp.asarray(slots, jnp.int32)
    assert grouped_experts.unsupported_reason(hidden, slots_TK, experts) == ""
    found = jax.jit(lambda *args: grouped_experts.multiply_grouped(*args, interpret=True))(hidden, slots_TK, experts)
    wanted = jax.jit(multiply_in_blocks)(hidden, slots_TK, expected or experts)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return float(np.abs(np.asarray(found - wanted, np.float32)[slots < SLOTS]).max(initial=0.0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SLOTS_OF_TOKENS)
def test_every_row_is_multiplied_with_its_expert(name: str, dtype: str):
    assert largest_difference(SLOTS_OF_TOKENS[name], experts_of(dtype)) <= TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("mean_rows", [0.1, 20.0, 60.0, 500.0])
def test_the_height_of_tiles_does_not_show(mean_rows: float):
    slots = SLOTS_OF_TOKENS["any, and elsewhere"]
    assert largest_difference(slots, experts_of("float32", mean_rows=mean_rows)) <= TOLERANCE["float32"]


@pytest.mark.slow
def test_biases_are_added_ahead_of_the_activation():
    experts = experts_of("float32", has_bias=True)
    clamped = replace(experts, config=replace(experts.config, activation=Activation("clamped_swiglu")))
    assert largest_difference(SLOTS_OF_TOKENS["any, and elsewhere"], clamped) <= TOLERANCE["float32"]


@pytest.mark.slow
def test_experts_without_a_gate_have_two_products():
    experts = experts_of("float32")
    weights = experts.weights._replace(gate_XDF=None)
    squared = replace(experts, weights=weights, config=replace(experts.config, activation=Activation("relu2")))
    assert largest_difference(SLOTS_OF_TOKENS["any, and elsewhere"], squared) <= 10 * TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("dtype", "has_blocks"),
    [
        pytest.param("int8", False, marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", False, marks=pytest.mark.slow),
        pytest.param("int8", True, marks=pytest.mark.slow),
        ("float8_e4m3fn", True),
    ],
)
def test_matrices_of_8_bits_are_scaled_in_the_kernel(dtype: str, has_blocks: bool):
    narrow, wide = random_experts(
        LAYERS * SLOTS, WIDTH, 256, seed=3, powers_of_two=True, dtype=dtype, has_blocks=has_blocks
    )
    config = ProductConfig(SLOTS, 8.0)
    held, plain = (LayerExperts(weights, jnp.asarray(SLOTS, jnp.int32), config) for weights in (narrow, wide))
    found = largest_difference(SLOTS_OF_TOKENS["any, and elsewhere"], held, expected=plain)
    scale = float(
        np.abs(np.asarray(multiply_in_blocks(jnp.ones((1, WIDTH)), jnp.zeros((1, 1), jnp.int32), plain))).max()
    )
    assert found <= 1e-5 * max(1.0, scale)


def planted(name: str) -> tuple[str, Any]:
    order, finished, block = grouped_experts.order_tiles, grouped_experts._finished, grouped_experts._block

    def of_the_next_layer(*args: Any, **named: Any) -> TileOrder:
        found = order(*args, **named)
        slots = (found.tiles.slot_I + SLOTS) % (LAYERS * SLOTS)
        return found._replace(tiles=found.tiles._replace(slot_I=slots))

    def one_row_late(*args: Any, **named: Any) -> TileOrder:
        found = order(*args, **named)
        first_I = jnp.where(found.tiles.end_I > 0, found.tiles.first_I + 1, 0)
        return found._replace(tiles=found.tiles._replace(first_I=first_I))

    return {
        "experts of another layer": ("order_tiles", of_the_next_layer),
        "tiles that begin late": ("order_tiles", one_row_late),
        "no scales": ("_finished", lambda total, each, *place: finished(total, each._replace(scales=None), *place)),
        "no scales of blocks": ("_block", lambda each, *place: block(each._replace(scales=None), *place)),
    }[name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", ["experts of another layer", "tiles that begin late"])
def test_a_planted_fault_is_found(fault: str, monkeypatch):
    monkeypatch.setattr(grouped_experts, *planted(fault))
    assert not largest_difference(SLOTS_OF_TOKENS["any, and elsewhere"], experts_of("float32")) <= 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "has_blocks"), [("no scales", False), ("no scales of blocks", True)])
def test_forgotten_scales_are_found(fault: str, has_blocks: bool, monkeypatch):
    narrow, wide = random_experts(LAYERS * SLOTS, WIDTH, 256, seed=3, powers_of_two=True, has_blocks=has_blocks)
    config = ProductConfig(SLOTS, 8.0)
    held, plain = (LayerExperts(weights, jnp.asarray(SLOTS, jnp.int32), config) for weights in (narrow, wide))
    monkeypatch.setattr(grouped_experts, *planted(fault))
    assert not largest_difference(SLOTS_OF_TOKENS["any, and elsewhere"], held, expected=plain) <= 1.0


def test_what_the_kernel_does_not_take_is_named_and_taken_by_xla():
    experts, hidden, slots = experts_of("float32"), jnp.zeros((2, WIDTH)), jnp.zeros((2, 1), jnp.int32)
    odd = replace(
        experts, weights=ExpertWeights(*(jnp.zeros((8, *size)) for size in ((128, 24), (128, 24), (24, 128))))
    )
    choice = GPU.experts.results.choose(hidden, slots, odd)
    assert str(choice) == "xla (triton: experts of 128 x 24 are no multiples of 16)"
    adapted = replace(experts, adapters=RowAdapters._make([None] * len(RowAdapters._fields)))
    assert str(GPU.experts.results.choose(hidden, slots, adapted)) == "xla (triton: rows have adapters)"
    for itemsize, gigabytes, chosen in ((1, 3, "xla"), (1, 2, "triton"), (1, 5, "triton"), (4, 3, "triton")):
        rows = (gigabytes << 30) // WIDTH // INNER // itemsize
        dtype = jnp.int8 if itemsize == 1 else jnp.float32
        weights = ExpertWeights(
            *(jax.ShapeDtypeStruct((rows, *size), dtype) for size in ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)))
        )
        choice = GPU.experts.results.choose(hidden, slots, replace(experts, weights=weights))
        assert choice.name == chosen, (itemsize, gigabytes)
    narrow = hidden.astype(jnp.bfloat16)
    reason = "rows of bfloat16 and matrices of float32"
    assert str(GPU.experts.sums.choose(narrow, slots, slots, experts)) == f"xla (triton: {reason})"
    assert str(GPU.experts.results.choose(hidden, slots, experts)) == "triton"
