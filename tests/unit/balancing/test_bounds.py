"""Replicas and bounds of cases small enough to be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.balancing.planner import lower_bound, replica_counts


def bound_of(load: list[float], *, ep_size: int, num_redundant: int) -> float:
    return lower_bound(np.array([load]), ep_size=ep_size, num_redundant=num_redundant)[0]


@pytest.mark.parametrize(
    ("load", "num_slots", "most", "counts"),
    [
        ([8, 4, 2, 1], 4, 4, [1, 1, 1, 1]),
        ([8, 4, 2, 1], 6, 4, [3, 1, 1, 1]),
        ([8, 4, 2, 1], 7, 4, [3, 2, 1, 1]),
        ([8, 4, 2, 1], 7, 2, [2, 2, 2, 1]),
        ([0, 0, 0, 0], 6, 2, [2, 2, 1, 1]),
        ([9, 0, 0], 5, 2, [2, 2, 1]),
    ],
)
def test_a_further_replica_goes_where_the_load_per_replica_is_greatest(load, num_slots, most, counts):
    assert replica_counts(np.array([load], float), num_slots=num_slots, max_replicas=most).tolist() == [counts]


def test_water_filling_is_what_one_replica_after_the_other_comes_to():
    load = np.exp(np.random.default_rng(1).normal(0, 1.5, (8, 40)))
    counts = np.ones(load.shape, np.int64)
    for _ in range(24):
        hottest = np.where(counts < 6, load / counts, -1).argmax(axis=1)
        counts[np.arange(8), hottest] += 1
    np.testing.assert_array_equal(replica_counts(load, num_slots=64, max_replicas=6), counts)


@pytest.mark.parametrize(
    ("load", "ep_size", "num_redundant", "bound"),
    [
        ([4, 4, 4, 4], 2, 0, 8),  # the mean rank
        ([9, 1, 1, 1], 2, 0, 10),  # the hottest expert with the coldest beside it
        ([5, 5, 5, 1, 1, 1], 2, 0, 11),  # two of the three hot ones meet on a rank, with a cold one
        ([9, 1, 1, 1], 2, 2, 6),  # the hottest expert twice
        ([8, 1, 1, 1, 1, 1, 1], 7, 0, 8),  # one expert per rank
        ([30, 1, 1, 1], 5, 1, 15),  # one replica is too few for the mean
        ([0, 0, 0, 0], 2, 0, 0),
    ],
)
def test_the_bound_of_small_cases(load, ep_size, num_redundant, bound):
    assert bound_of(load, ep_size=ep_size, num_redundant=num_redundant) == pytest.approx(bound)
