"""Histograms count every value once, at the least bound that is not below it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.observability.metrics import Histogram

BOUNDS = (0.5, 1, 2)
VALUES = st.lists(st.sampled_from([0.0, 0.5, 0.6, 1.0, 2.0, 2.1, 99.0]))


@given(ones=VALUES, many=VALUES)
def test_buckets_hold_what_is_at_or_below_their_bound(ones, many):
    histogram = Histogram(BOUNDS)
    for value in ones:
        histogram.add(value)
    histogram.add_all(np.asarray(many))
    histogram.add(1.5, 3)
    values = [*ones, *many, 1.5, 1.5, 1.5]
    state = histogram.state()
    assert state.bounds == (*BOUNDS, float("inf"))
    assert state.at_or_below == tuple(sum(value <= bound for value in values) for bound in state.bounds)
    assert state.total == pytest.approx(sum(values))
