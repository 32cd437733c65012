"""The grouped kernel gives every row what its own expert makes of it, in interpret mode."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.adapters import AdapterPair, ExpertAdapters, RowAdapters
from rayserve_moe.kernels.reference.activations import SILU, Activation
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_in_blocks,
)
from rayserve_moe.kernels.table import TPU
from rayserve_moe.kernels.tpu import grouped_ffn
from tests.support.experts.quantized_experts import random_experts
from tests.support.kernels.interpreter import interpreted

SLOTS, WIDTH = 4, 128
SLOTS_OF_TOKENS = {
    "any, and elsewhere": np.random.default_rng(1).integers(0, SLOTS + 2, (50, 3)),
    "more than a tile of one": np.where(np.random.default_rng(2).random((50, 2)) < 0.9, 1, 3),
    "none of the first and the last": np.random.default_rng(3).integers(1, SLOTS - 1, (9, 2)),
    "one row": np.full((1, 1), 2),
}


def without_gate(weights: ExpertWeights) -> ExpertWeights:
    return weights._replace(gate_XDF=None, gate_scale_XZF=None)


def config_for(weights: ExpertWeights) -> ProductConfig:
    return ProductConfig(SLOTS, 8.0, Activation("relu2") if weights.gate_XDF is None else SILU)


def experts_of(inner: int, dtype: str) -> LayerExperts:
    generator = np.random.default_rng(inner)
    shapes = [(2 * SLOTS, WIDTH, inner), (2 * SLOTS, WIDTH, inner), (2 * SLOTS, inner, WIDTH)]
    weights = (jnp.asarray(generator.standard_normal(shape) / 8, dtype) for shape in shapes)
    return LayerExperts(ExpertWeights(*weights), jnp.asarray(SLOTS, jnp.int32), ProductConfig(SLOTS, 8.0))


def largest_difference(slots: np.ndarray, experts: LayerExperts, *, expected: LayerExperts | None = None) -> float:
    """From the product in blocks, of the rows that are here; what the kernel does not write is NaN.

    The product is that of `expected`, if given.
    """
    hidden = jnp.asarray(np.random.default_rng(slots.size).standard_normal((len(slots), WIDTH)), jnp.float32)
    hidden, slots_TK = hidden.astype(experts.weights.up_XDF.dtype), jnp.asarray(slots, jnp.int32)
    found = interpreted(TPU.experts.results, interpret=True)(hidden, slots_TK, experts)
    wanted = multiply_in_blocks(hidden, slots_TK, expected or experts)
    return float(np.abs(np.asarray(found - wanted, np.float32)[slots < SLOTS]).max())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("slots", SLOTS_OF_TOKENS.values(), ids=SLOTS_OF_TOKENS.keys())
def test_an_expert_that_is_held_whole(slots):
    assert largest_difference(slots, experts_of(128, "float32")) < 1e-4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("slots", SLOTS_OF_TOKENS.values(), ids=SLOTS_OF_TOKENS.keys())
def test_an_expert_in_parts(slots, monkeypatch):
    monkeypatch.setattr(grouped_ffn, "WEIGHT_BYTES", 2 * 3 * WIDTH * 128 * 4)
    assert grouped_ffn.inner_block(WIDTH, 256, 4) == 128
    assert largest_difference(slots, experts_of(256, "float32")) < 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_experts_without_a_gate(num_parts, monkeypatch):
    """In float32, and in 8 bits against the numbers that they stand for; held whole, or in parts of 128 columns."""
    monkeypatch.setattr(grouped_ffn, "inner_block", lambda *_, **__: 256 // num_parts)
    weights = without_gate(experts_of(256, "float32").weights)
    experts = LayerExperts(weights, jnp.asarray(SLOTS, jnp.int32), config_for(weights))
    assert largest_difference(SLOTS_OF_TOKENS["any, and elsewhere"], experts) < 1e-4
    pair = random_experts(2 * SLOTS, WIDTH, 256, seed=1, powers_of_two=True, dtype="int8")
    found, wanted = (multiplied(without_gate(each), "float32") for each in pair)
    np.testing.assert_array_equal(found, wanted)


def test_columns_of_zeros_add_nothing():
    """Experts of another width are padded to whole lanes."""
    slots, narrow, wide = SLOTS_OF_TOKENS["any, and elsewhere"], experts_of(88, "float32"), experts_of(128, "float32")
    padded = jax.tree.map(lambda own, held: jnp.pad(own, padding_to(own, held)), narrow.weights, wide.weights)
    assert largest_difference(slots, replace(wide, weights=padded), expected=narrow) < 1e-4


def padding_to(own: jax.Array, held: jax.Array) -> list[tuple[int, int]]:
    return [(0, more - less) for less, more in zip(own.shape, held.shape, strict=True)]


def test_shapes_that_the_kernel_does_not_take_go_another_way(monkeypatch):
    monkeypatch.setattr(grouped_ffn, "WEIGHT_BYTES", 0)
    assert largest_difference(SLOTS_OF_TOKENS["any, and elsewhere"], experts_of(128, "float32")) < 1e-4
    hidden, slots = (jax.ShapeDtypeStruct((50, size), "float32") for size in (WIDTH, 3))
    choice = interpreted(TPU.experts.results, interpret=True).choose(hidden, slots, experts_of(128, "float32"))
    assert str(choice) == "ragged_dot (grouped_ffn: no block of an expert of 128 x 128 fits twice in 0 MiB)"
    assert grouped_ffn.inner_block(100, 128, 2) == 0
    assert grouped_ffn.inner_block(128, 100, 2) == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("narrow", "has_blocks"), [("int8", False), ("float8_e4m3fn", False), ("float8_e4m3fn", True)])
def test_an_expert_in_8_bits_has_the_bits_of_the_numbers_that_it_stands_for(
    narrow, has_blocks, dtype, num_parts, monkeypatch
):
    """With scales that are powers of two; held whole, or in parts of 128 columns."""
    monkeypatch.setattr(grouped_ffn, "inner_block", lambda *_, **__: 256 // num_parts)
    form = {"dtype": narrow, "has_blocks": has_blocks}
    quantized, plain = random_experts(2 * SLOTS, WIDTH, 256, seed=1, powers_of_two=True, **form)
    found, wanted = (multiplied(weights, dtype) for weights in (quantized, plain))
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(found).max() > 0.1


def test_integers_that_are_converted_already_are_scaled_all_the_same():
    quantized, _ = random_experts(2 * SLOTS, WIDTH, 128, seed=2)
    wide = [array.astype(jnp.bfloat16) for array in quantized[:3]]
    found, wanted = (multiplied(each, "bfloat16") for each in (ExpertWeights(*wide, *quantized[3:]), quantized))
    np.testing.assert_array_equal(found, wanted)


def test_integers_are_held_in_half_the_memory_of_bfloat16():
    assert [grouped_ffn.inner_block(2048, 4096, size) for size in (1, 2)] == [2048, 1024]


def adapters_of(experts: LayerExperts, num_tokens: int, *, resident: int = 3, rank: int = 8) -> RowAdapters:
    """Return adapters of all matrices; every fourth token has none."""
    weights, generator = experts.weights, np.random.default_rng(5)

    def pair(matrix: jax.Array) -> AdapterPair:
        sizes = matrix.shape[1:]
        dtype = jnp.bfloat16 if matrix.dtype.itemsize == 1 else matrix.dtype
        drawn = (generator.standard_normal((len(matrix), resident, rank, size)) / 4 for size in sizes)
        return AdapterPair(*(jnp.asarray(each, dtype) for each in drawn))

    gate = None if weights.gate_XDF is None else pair(weights.gate_XDF)
    adapter_T = jnp.arange(num_tokens, dtype=jnp.int32) % (resident + 1) - 1
    return RowAdapters(ExpertAdapters(gate, pair(weights.up_XDF), pair(weights.down_XFD)), adapter_T)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("slots", SLOTS_OF_TOKENS.values(), ids=SLOTS_OF_TOKENS.keys())
def test_each_row_has_its_own_adapter(slots):
    experts = experts_of(128, "float32")
    assert largest_difference(slots, replace(experts, adapters=adapters_of(experts, len(slots)))) < 2e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_have_the_bits_of_other_adapters_beside_them_and_of_none(dtype):
    experts, slots = experts_of(128, dtype), SLOTS_OF_TOKENS["any, and elsewhere"]
    mixed = adapters_of(experts, len(slots))
    hidden = jnp.asarray(np.random.default_rng(7).standard_normal((len(slots), WIDTH)), dtype)

    def rows(adapters: RowAdapters | None, own: np.ndarray) -> np.ndarray:
        each = replace(experts, adapters=adapters)
        found = grouped_ffn.multiply_grouped(hidden, jnp.asarray(slots, jnp.int32), each, interpret=True)
        return np.asarray(found, np.float32)[own[:, None] & (slots < SLOTS)]

    base = rows(None, np.asarray(mixed.slot_T) >= 0)
    for adapter in range(-1, 3):
        own = np.asarray(mixed.slot_T) == adapter
        alone = mixed._replace(slot_T=jnp.where(own, mixed.slot_T, -1))
        np.testing.assert_array_equal(rows(mixed, own), rows(None if adapter < 0 else alone, own))
    assert (rows(mixed, np.asarray(mixed.slot_T) >= 0) != base).any(axis=1).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn"])
def test_experts_in_8_bits_and_without_a_gate_take_adapters(narrow):
    slots = SLOTS_OF_TOKENS["any, and elsewhere"]
    hidden = jnp.asarray(np.random.default_rng(7).standard_normal((len(slots), WIDTH)), jnp.bfloat16)
    pair = random_experts(2 * SLOTS, WIDTH, 128, seed=1, powers_of_two=True, dtype=narrow, has_blocks=narrow != "int8")
    found = []
    for weights in map(without_gate, pair):
        wide = jax.tree.map(
            lambda array: array if array.dtype.itemsize == 1 else array.astype(jnp.bfloat16), weights[:3]
        )
        experts = LayerExperts(ExpertWeights(*wide, *weights[3:]), jnp.int32(SLOTS), config_for(weights))
        experts = replace(experts, adapters=adapters_of(experts, len(slots)))
        made = grouped_ffn.multiply_grouped(hidden, jnp.asarray(slots, jnp.int32), experts, interpret=True)
        found.append(np.asarray(made, np.float32)[slots < SLOTS])
    np.testing.assert_array_equal(*found)
    assert np.abs(found[0]).max() > 0.1


@pytest.mark.slow
def test_adapters_that_the_kernel_does_not_take_go_another_way(monkeypatch):
    experts = experts_of(256, "float32")
    adapters = adapters_of(experts, 50)
    hidden, slots = (jax.ShapeDtypeStruct((50, size), "float32") for size in (WIDTH, 3))

    def reason(adapters: RowAdapters) -> str:
        return grouped_ffn.unsupported_reason(hidden, slots, replace(experts, adapters=adapters), interpret=True)

    assert not reason(adapters)
    shared = adapters.experts.up._replace(a_LSRI=adapters.experts.up.a_LSRI[::SLOTS])
    assert "carry ranks" in reason(adapters._replace(experts=adapters.experts._replace(up=shared)))
    assert "of a core's memory" in reason(adapters_of(experts, 50, resident=64, rank=512))
    monkeypatch.setattr(grouped_ffn, "WEIGHT_BYTES", 2 * 3 * WIDTH * 128 * 4)
    assert "as a whole" in reason(adapters)
    slots_TK = SLOTS_OF_TOKENS["any, and elsewhere"]
    assert largest_difference(slots_TK, replace(experts, adapters=adapters)) < 4e-4


def multiplied(weights: ExpertWeights, dtype: str) -> np.ndarray:
    """Rows of the second layer that are here, by the kernel."""
    slots = SLOTS_OF_TOKENS["any, and elsewhere"]
    hidden = jnp.asarray(np.random.default_rng(7).standard_normal((len(slots), WIDTH)), dtype)
    matrices = jax.tree.map(lambda array: array if array.dtype.itemsize == 1 else array.astype(dtype), weights[:3])
    experts = LayerExperts(ExpertWeights(*matrices, *weights[3:]), jnp.asarray(SLOTS, jnp.int32), config_for(weights))
    found = grouped_ffn.multiply_grouped(hidden, jnp.asarray(slots, jnp.int32), experts, interpret=True)
    return np.asarray(found, np.float32)[slots < SLOTS]
