"""A MoE layer returns its sums with the routing in logical ids, and does not see padding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.expert_cases import MoeCase, MoeRun, dense, placements_for, plan_of

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
