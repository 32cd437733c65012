"""Products of experts with each row's own adapter; rows without one keep the bits of the base model."""

# T tokens   K experts per token   X layers * expert slots   S resident adapters   R rank

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.adapters import AdapterPair, ExpertAdapters, RowAdapters, add_carried, carry_ranks
from rayserve_moe.kernels.cpu_native import calls
from rayserve_moe.kernels.narrow_weights import NARROW
from rayserve_moe.kernels.reference.activations import Activation
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_by_ragged_dot,
    multiply_in_blocks,
    sum_results,
)
from tests.support.experts.quantized_experts import random_experts
from tests.support.kernels.native_kernels import laid_out, need_native_kernels

in_blocks = jax.jit(multiply_in_blocks)
TOKENS, TOP_K, WIDTH, INNER, SLOTS, RESIDENT, RANK = 13, 2, 40, 64, 4, 3, 8
ADAPTER_T = [(t % (RESIDENT + 1)) - 1 for t in range(TOKENS)]
"""Place of each token's adapter; -1 for none."""
CONFIG = ProductConfig(SLOTS, TOKENS * TOP_K / SLOTS, Activation("clamped_swiglu", slope=1.3, limit=3.0))


class Kernel(NamedTuple):
    """A product of experts, and how it holds their matrices."""

    run: Callable[..., jax.Array]
    dtype: str
    is_packed: bool = False


KERNELS = {
    "blocks": Kernel(multiply_in_blocks, "float32"),
    "ragged_dot": Kernel(multiply_by_ragged_dot, "float32"),
    "blocks, bfloat16": Kernel(multiply_in_blocks, "bfloat16"),
    "native": Kernel(calls.expert_results, "bfloat16", is_packed=True),
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if "bfloat16" in name else ()) for name in KERNELS])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "native":
        need_native_kernels()
    return KERNELS[request.param]


def draw(*shape: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


MATRICES = ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))
WEIGHTS = [draw(2 * SLOTS, *shape, seed=seed, scale=shape[0] ** -0.5) for seed, shape in enumerate(MATRICES)]
BIASES = [draw(2 * SLOTS, outputs, seed=10 + seed) for seed, (_, outputs) in enumerate(MATRICES)]
PAIRS = [
    tuple(draw(2 * SLOTS, RESIDENT, RANK, size, seed=20 + seed + size, scale=0.2) for size in shape)
    for seed, shape in enumerate(MATRICES)
]
HIDDEN = draw(TOKENS, WIDTH, seed=30)
SLOTS_TK = np.stack([np.random.default_rng(t).permutation(SLOTS)[:TOP_K] for t in range(TOKENS)]).astype(np.int32)
SLOTS_TK[3, 1] = SLOTS  # an expert of another device


def experts_of(kernel: Kernel, weights: list[np.ndarray]) -> LayerExperts:
    """Return the experts of the second layer."""
    arrays = [jnp.asarray(each, kernel.dtype) for each in (*weights, *BIASES)]
    if kernel.is_packed:
        arrays[:3] = map(laid_out, arrays[:3])
    return LayerExperts(ExpertWeights(*arrays), jnp.int32(SLOTS), CONFIG)


def adapters_of(pairs: Any, adapter_T: list[int], dtype: str) -> RowAdapters:
    as_arrays = (AdapterPair(*(jnp.asarray(each, dtype) for each in pair)) for pair in pairs)
    return RowAdapters(ExpertAdapters(*as_arrays), jnp.asarray(adapter_T, jnp.int32))


def results(
    kernel: Kernel, adapter_T: list[int] | None, *, tokens: slice = slice(None), pairs: Any = PAIRS
) -> np.ndarray:
    experts = experts_of(kernel, WEIGHTS)
    if adapter_T is not None:
        experts = replace(experts, adapters=adapters_of(pairs, adapter_T, kernel.dtype))
    found = kernel.run(jnp.asarray(HIDDEN, kernel.dtype)[tokens], jnp.asarray(SLOTS_TK)[tokens], experts)
    return np.asarray(found.astype(jnp.float32))


def merged(adapter: int) -> list[np.ndarray]:
    """Return the weights with an adapter merged in float64; -1 for none."""
    if adapter < 0:
        return WEIGHTS
    deltas = (np.einsum("xri,xro->xio", *(each[:, adapter].astype(np.float64) for each in pair)) for pair in PAIRS)
    return [weight + delta for weight, delta in zip(WEIGHTS, deltas, strict=True)]


def test_each_row_is_that_of_its_merged_experts(kernel: Kernel):
    found, here = results(kernel, ADAPTER_T), SLOTS_TK < SLOTS
    tolerance = 2e-5 if kernel.dtype == "float32" else 2**-5
    for adapter in range(-1, RESIDENT):
        exact = in_blocks(jnp.asarray(HIDDEN), jnp.asarray(SLOTS_TK), experts_of(KERNELS["blocks"], merged(adapter)))
        own = (np.array(ADAPTER_T) == adapter)[:, None] & here
        np.testing.assert_allclose(found[own], np.asarray(exact)[own], atol=tolerance * np.abs(exact).max(), rtol=0)


def test_a_row_keeps_its_bits_whatever_adapters_are_beside_it(kernel: Kernel):
    found, base, here = results(kernel, ADAPTER_T), results(kernel, None), SLOTS_TK < SLOTS
    for adapter in range(RESIDENT):
        own = np.array(ADAPTER_T) == adapter
        alone = results(kernel, [each if each == adapter else -1 for each in ADAPTER_T])
        np.testing.assert_array_equal(found[own][here[own]], alone[own][here[own]])
        assert (found[own] != base[own])[here[own]].any(axis=1).all()
    without = np.array(ADAPTER_T) < 0
    np.testing.assert_array_equal(found[without][here[without]], base[without][here[without]])


def test_a_row_has_the_same_bits_alone_by_native_kernels():
    need_native_kernels()
    native = KERNELS["native"]
    found = results(native, ADAPTER_T)
    for token in (0, 4, 7):
        alone = results(native, ADAPTER_T[token : token + 1], tokens=slice(token, token + 1))
        np.testing.assert_array_equal(alone[0], found[token])


SHARED = [
    [each[::SLOTS] if place == part else each for place, each in enumerate(pair)]
    for pair, part in zip(PAIRS, (0, 0, 1), strict=True)
]
"""Shapes with A of gate and up, and B of down, once for all experts of a layer."""
EXPANDED = [[np.repeat(each, SLOTS, axis=0) if len(each) == 2 else each for each in pair] for pair in SHARED]
"""Shapes with all matrices for each expert."""


def test_a_matrix_that_experts_share_gives_the_bits_of_its_copies(kernel: Kernel):
    shared, expanded = (results(kernel, ADAPTER_T, pairs=pairs) for pairs in (SHARED, EXPANDED))
    here = SLOTS_TK < SLOTS
    np.testing.assert_array_equal(shared[here], expanded[here])
    assert (shared[here] != results(kernel, ADAPTER_T)[here]).any()


@pytest.mark.parametrize("has_gate", [True, False])
def test_ranks_beside_tokens_give_the_sums_of_copies(has_gate: bool):
    """Each token is multiplied once by the matrices that experts share; tokens without an adapter keep their bits."""
    kernel, layer = KERNELS["ragged_dot"], jnp.int32(1)
    gates = jnp.asarray(np.random.default_rng(3).random(SLOTS_TK.shape), jnp.float32)
    experts = experts_of(kernel, WEIGHTS)
    if not has_gate:
        weights = experts.weights._replace(gate_XDF=None, gate_bias_XF=None)
        experts = replace(experts, weights=weights, config=replace(CONFIG, activation=Activation("relu2")))

    def sums(hidden: jax.Array, adapters: RowAdapters) -> jax.Array:
        own = adapters if has_gate else adapters._replace(experts=adapters.experts._replace(gate=None))
        with_them = replace(experts, adapters=own)
        carried = carry_ranks(hidden, own, layer=layer) if own.experts.share_outer else hidden
        out = sum_results(carried, jnp.asarray(SLOTS_TK), gates, with_them, multiply=multiply_by_ragged_dot)
        return add_carried(out, own, layer=layer, width=WIDTH) if own.experts.share_outer else out

    hidden = jnp.asarray(HIDDEN)
    found, expected, base = (
        np.asarray(sums(hidden, adapters_of(pairs, adapter_T, "float32")))
        for pairs, adapter_T in ((SHARED, ADAPTER_T), (EXPANDED, ADAPTER_T), (SHARED, [-1] * TOKENS))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    without = np.array(ADAPTER_T) < 0
    np.testing.assert_array_equal(found[without], base[without])
    np.testing.assert_array_equal(found[without], expected[without])
    assert (found[~without] != base[~without]).any(axis=1).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("multiply", [multiply_in_blocks, multiply_by_ragged_dot])
def test_experts_of_8_bits_take_adapters(multiply: Callable[..., jax.Array], has_blocks: bool):
    """Adapters are not rounded to 8 bits: results equal those of the same numbers in float32."""
    adapters = RowAdapters(
        ExpertAdapters(*(AdapterPair(*map(jnp.asarray, pair)) for pair in PAIRS)), jnp.asarray(ADAPTER_T, jnp.int32)
    )
    narrow, wide = (
        LayerExperts(weights, jnp.int32(SLOTS), CONFIG, adapters)
        for weights in random_experts(2 * SLOTS, WIDTH, INNER, seed=1, powers_of_two=True, has_blocks=has_blocks)
    )
    found, expected = (
        np.asarray(multiply(jnp.asarray(HIDDEN), jnp.asarray(SLOTS_TK), each)) for each in (narrow, wide)
    )
    here = SLOTS_TK < SLOTS
    np.testing.assert_allclose(found[here], expected[here], rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", NARROW)
def test_native_experts_of_8_bits_take_adapters(dtype: str):
    need_native_kernels()
    pairs = (AdapterPair(*(jnp.asarray(each, jnp.bfloat16) for each in pair)) for pair in PAIRS)
    adapters = RowAdapters(ExpertAdapters(*pairs), jnp.asarray(ADAPTER_T, jnp.int32))
    narrow, plain = random_experts(2 * SLOTS, WIDTH, INNER, seed=1, powers_of_two=True, dtype=dtype)
    packed = ExpertWeights(*map(laid_out, narrow[:3]), *narrow[3:])
    wide = ExpertWeights(*(laid_out(array.astype(jnp.bfloat16)) for array in plain[:3]))
    hidden, slots = jnp.asarray(HIDDEN, jnp.bfloat16), jnp.asarray(SLOTS_TK)
    found, expected, base = (
        np.asarray(calls.expert_results(hidden, slots, LayerExperts(weights, jnp.int32(SLOTS), CONFIG, of_rows)))
        for weights, of_rows in ((packed, adapters), (wide, adapters), (packed, None))
    )
    here = SLOTS_TK < SLOTS
    np.testing.assert_array_equal(found[here], expected[here])
    assert (found[here] != base[here]).any()


@pytest.mark.parametrize("changes", [{"rank": 4}, {"slot": RESIDENT}, {"inputs": 22}, {"experts": SLOTS}], ids=str)
def test_adapters_that_do_not_fit_are_refused(changes: dict[str, int]):
    need_native_kernels()
    experts = experts_of(KERNELS["native"], WEIGHTS)
    first, *others = (AdapterPair(*(jnp.asarray(each, jnp.bfloat16) for each in pair)) for pair in PAIRS)
    a, b = (each[: changes.get("experts", 2 * SLOTS)] for each in first)
    wrong = AdapterPair(a[..., : changes.get("inputs", WIDTH)], b[:, :, : changes.get("rank", RANK)])
    adapters = RowAdapters(ExpertAdapters(wrong, *others), jnp.asarray([changes.get("slot", 0)], jnp.int32))
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        jax.block_until_ready(
            calls.expert_results(
                jnp.zeros((1, WIDTH), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32), replace(experts, adapters=adapters)
            )
        )
