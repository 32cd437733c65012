"""Windows hold what was counted in the last steps, whatever counts do meanwhile: wrap around, start anew, come late."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.balancing.load_window import AGED, BUCKETS, LoadReading, LoadWindow

SHAPE = (2, 3)


def reading(step: int, counts: object, generation: int = 0) -> LoadReading:
    wrapped = np.broadcast_to(np.asarray(counts, np.int64), SHAPE).astype(np.uint32).astype(np.int32)
    return LoadReading(generation, step, wrapped)


def window_over(size: int, *readings: LoadReading) -> LoadWindow:
    window = LoadWindow(size)
    for one in readings:
        window.add(one)
    return window


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=30), st.integers(0, 2**32 - 1))
def test_all_that_is_young_is_counted_wherever_counting_began_and_wrapped(added, start):
    totals = start + np.cumsum([0, *added])
    window = window_over(10**9, *(reading(step, total) for step, total in enumerate(totals)))
    np.testing.assert_allclose(window.totals(), sum(added), rtol=1e-6)


def test_tokens_fade_until_they_leave_the_window():
    window = window_over(100, reading(0, 0), reading(10, 1000))
    seen = [window.totals()[0, 0]]
    for step in (60, 100, 101, 111):
        window.add(reading(step, 1000))
        seen.append(window.totals()[0, 0])
    np.testing.assert_allclose(seen, [1000, 1000 * AGED**0.5, 1000 * AGED**0.9, 0, 0])


def test_the_last_reading_counts_however_short_the_window():
    assert (window_over(1, reading(0, 0), reading(16, 5), reading(32, 12)).totals() == 7).all()


def test_a_long_window_keeps_few_arrays_and_loses_nothing():
    window = LoadWindow(10_000)
    for step in range(0, 9_000, 10):
        window.add(reading(step, step))
    assert len(window._buckets) <= BUCKETS + 1
    assert 8990 * AGED < window.totals()[0, 0] < 8990


@pytest.mark.parametrize(
    "begins_anew",
    [reading(48, 1_000_000, generation=1), reading(48, 90), LoadReading(0, 48, np.zeros((3, 3), np.int32))],
    ids=["other weights", "counts fell", "another model"],
)
def test_counting_that_starts_anew_is_compared_with_nothing_before(begins_anew):
    window = window_over(100, reading(0, 0), reading(16, 100), begins_anew)
    assert (window.totals() == 0).all()
    grown = LoadReading(begins_anew.generation, 64, begins_anew.counts + 3)
    window.add(grown)
    assert (window.totals() == 3).all()


@pytest.mark.parametrize("step", [16, 3])
def test_a_reading_that_comes_twice_or_late_changes_nothing(step):
    window = window_over(100, reading(0, 0), reading(16, 100), reading(step, 100), reading(32, 110))
    assert window.totals()[0, 0] == pytest.approx(10 + 100 * AGED**0.16)


def test_nothing_is_there_before_the_first_reading():
    assert LoadWindow(5).totals().size == 0
