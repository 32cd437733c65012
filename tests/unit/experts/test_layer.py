"""A MoE layer returns its sums with the routing in logical ids, and does not see padding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.experts.moe_layer import GROUPED, MoeCase, MoeRun, dense, placements_for, plan_of

CASE = MoeCase(num_tokens=10, num_experts=8, top_k=3, width=6, inner=4)


@pytest.fixture(scope="module")
def run() -> MoeRun:
    return MoeRun(CASE, plan_of(1, 1), backend="auto")


def test_padding_comes_out_as_zeros_and_is_not_counted(run):
    valid = np.arange(10) < 6
    result = run(None, valid=valid)
    assert (result.out[~valid] == 0).all() and (result.out[valid] != 0).any(axis=1).all()
    np.testing.assert_array_equal(result.counts[0], np.bincount(result.ids[valid].reshape(-1), minlength=8))


def test_routing_does_not_know_where_experts_lie(run):
    for placement in placements_for(CASE, run.plan, 0):
        result = run(placement)
        np.testing.assert_array_equal(result.ids, dense(CASE, 1).ids)
        np.testing.assert_array_equal(result.counts, dense(CASE, 1).counts)


def test_devices_of_a_tensor_group_count_their_tokens_once():
    result = MoeRun(CASE, plan_of(1, 2), backend="auto")(None)
    assert result.counts.sum() == CASE.valid(1).sum() * CASE.top_k


@pytest.mark.parametrize(
    ("backend", "mesh", "kernels"),
    [
        ("replicated", (2, 2), "cpu"),
        ("all_to_all", (2, 2), "tpu"),
        pytest.param("local", (1, 1), "cpu", marks=pytest.mark.slow),
        pytest.param("all_to_all", (2, 2), "cpu", marks=pytest.mark.slow),
        pytest.param("fused", (2, 2), "cpu", marks=pytest.mark.slow),
    ],
)
def test_experts_with_biases_of_a_grouped_router_are_the_dense_layer(backend, mesh, kernels):
    """In any slots, on any mesh, by any product: the bias of a result is added once, before its weight."""
    run = MoeRun(GROUPED, plan_of(*mesh), backend=backend, num_redundant=8, kernels=kernels)
    expected = dense(GROUPED, mesh[0])
    for placement in placements_for(GROUPED, run.plan, 8)[1:]:
        result = run(placement)
        np.testing.assert_array_equal(result.ids, expected.ids)
        np.testing.assert_array_equal(result.counts, expected.counts)
        np.testing.assert_allclose(result.out, expected.out, atol=2e-5, rtol=1e-5)
