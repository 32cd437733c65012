"""Every backend brings the adapter of a token to its experts, wherever these lie."""

# S resident adapters   R rank   T tokens

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.support.experts.moe_layer import NUM_LAYERS, MoeCase, MoeRun, dense, placements_for, plan_of

CASE = MoeCase(num_tokens=37, width=128, inner=48)
RESIDENT, RANK, MESH = 3, 4, (2, 2)
NUM_TOKENS = MESH[0] * CASE.num_tokens
ADAPTER_T = np.random.default_rng(0).integers(-1, RESIDENT, NUM_TOKENS).astype(np.int32)


def drawn_pairs(case: MoeCase) -> list[list[np.ndarray]]:
    """Return A and B of gate, up and down by logical expert, [layers, experts, S, R, ...]."""
    random, shape = np.random.default_rng(1), (NUM_LAYERS, case.num_experts, RESIDENT, RANK)
    sizes = ((case.width, case.inner), (case.width, case.inner), (case.inner, case.width))
    return [[(random.standard_normal((*shape, size)) * 0.15).astype(np.float32) for size in pair] for pair in sizes]


PAIRS = drawn_pairs(CASE)


@cache
def compiled(backend: str, shares_outer: bool = False) -> MoeRun:
    optimized, kernels = backend != "replicated", "tpu" if shares_outer else "cpu"
    return MoeRun(
        CASE,
        plan_of(*MESH),
        backend=backend,
        num_redundant=8,
        optimized=optimized,
        kernels=kernels,
        shares_outer=shares_outer,
    )


def merged(adapter: int, case: MoeCase = CASE, *, pairs: list[list[np.ndarray]] = PAIRS) -> MoeCase:
    """Return a case with an adapter merged in float64; -1 for none."""
    case = replace(case)
    if adapter >= 0:
        deltas = (np.einsum("lxri,lxro->lxio", *(each[:, :, adapter].astype(np.float64) for each in p)) for p in pairs)
        vars(case)["weights"] = [weight + delta for weight, delta in zip(CASE.weights, deltas, strict=True)]
    return case


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["replicated", "all_to_all", pytest.param("fused", marks=pytest.mark.slow)])
def test_tokens_take_their_own_adapter_wherever_experts_lie(backend: str):
    """An exchange returns the same bits for every placement, and the base model's bits without an adapter."""
    run = compiled(backend)
    placements = placements_for(CASE, run.plan, 8)
    results = [run(each, pairs=PAIRS, adapter_T=ADAPTER_T) for each in placements]
    base = run(placements[0])
    for adapter in range(-1, RESIDENT):
        wanted, own = dense(merged(adapter), MESH[0]), adapter == ADAPTER_T
        for found in results:
            np.testing.assert_array_equal(found.ids, wanted.ids)
            np.testing.assert_allclose(found.out[own], wanted.out[own], atol=2e-5, rtol=2e-5)
    np.testing.assert_array_equal(results[0].out[ADAPTER_T < 0], base.out[ADAPTER_T < 0])
    has_rows = (ADAPTER_T >= 0) & CASE.valid(MESH[0])
    assert (results[0].out[has_rows] != base.out[has_rows]).any(axis=1).all()
    if backend != "replicated":
        for other in results[1:]:
            np.testing.assert_array_equal(other.out, results[0].out)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["replicated", "all_to_all"])
def test_matrices_that_experts_share_are_multiplied_beside_the_exchange(backend: str):
    """Tokens carry the ranks of their adapter to the experts and back, and rows without one keep their bits."""
    run = compiled(backend, shares_outer=True)
    gate, up, down = PAIRS
    shared = [[gate[0][:, 0], gate[1]], [up[0][:, 0], up[1]], [down[0], down[1][:, 0]]]
    for_each = [[first(gate[0]), gate[1]], [first(up[0]), up[1]], [down[0], first(down[1])]]
    placements = placements_for(CASE, run.plan, 8)
    results = [run(each, pairs=shared, adapter_T=ADAPTER_T) for each in placements]
    base = run(placements[0], pairs=shared, adapter_T=np.full_like(ADAPTER_T, -1))
    for adapter in range(-1, RESIDENT):
        wanted, own = dense(merged(adapter, pairs=for_each), MESH[0]), adapter == ADAPTER_T
        for found in results:
            np.testing.assert_array_equal(found.ids, wanted.ids)
            np.testing.assert_allclose(found.out[own], wanted.out[own], atol=2e-5, rtol=2e-5)
    np.testing.assert_array_equal(results[0].out[ADAPTER_T < 0], base.out[ADAPTER_T < 0])


def first(matrices: np.ndarray) -> np.ndarray:
    """Return the matrix of the first expert for each expert."""
    return np.repeat(matrices[:, :1], CASE.num_experts, axis=1)


def test_rounds_of_an_uneven_chunk_keep_the_adapters_of_their_rows():
    """All rows go to one rank, in several rounds."""
    run = compiled("all_to_all")
    placement = placements_for(CASE, run.plan, 8)[0]
    hidden, router = CASE.hidden(MESH[0]), CASE.router * 0.1
    hidden[:, 0], router[0], router[0, :4] = 1.0, -50.0, 0.0
    changes = {"hidden": hidden, "router": router, "valid": np.ones(NUM_TOKENS, bool)}
    found = run(placement, pairs=PAIRS, adapter_T=ADAPTER_T, **changes)
    for adapter in range(-1, RESIDENT):
        wanted, own = dense(merged(adapter), MESH[0], **changes), adapter == ADAPTER_T
        np.testing.assert_allclose(found.out[own], wanted.out[own], atol=5e-5, rtol=5e-5)


def test_steps_with_adapters_add_up_as_device_sums():
    """Device sums leave tokens with adapters to all-to-all; others keep their bits."""
    case, data = replace(CASE, num_tokens=48), 4
    run, adapter_T = MoeRun(case, plan_of(data, 1), backend="device_sums"), np.arange(4 * 48, dtype=np.int32) % 4 - 1
    found, base = run(pairs=PAIRS, adapter_T=adapter_T), run()
    np.testing.assert_array_equal(found.out[adapter_T < 0], base.out[adapter_T < 0])
    for adapter in range(RESIDENT):
        wanted, own = dense(merged(adapter, case), data), adapter_T == adapter
        np.testing.assert_allclose(found.out[own], wanted.out[own], atol=2e-5, rtol=2e-5)
