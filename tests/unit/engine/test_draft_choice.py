"""As many drafts as measured times make worth it, and none where they lose."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.engine.speculation.policy import Acceptance, choose_drafts
from rayserve_moe.engine.speculation.step_times import StepTimes, seconds_of
from tests.support.engine.schedulers import some_reach

FLAT = {1: 1.0, 64: 1.01}
STEEP = {1: 1.0, 64: 64.0}


def chosen(share: float, times: dict[int, float], *, available: int = 7) -> int:
    times_of = {"plain": {1: 1.0}, "verifying": times, "reach": some_reach()}
    return choose_drafts(1, np.array([available]), acceptance=np.array([share]), **times_of)


def test_free_rows_take_all_drafts_and_dear_ones_none():
    assert chosen(0.9, FLAT) == 7
    assert chosen(0.9, STEEP) == 0
    assert chosen(0.01, {1: 1.0, 8: 1.5}) == 0


def test_between_them_the_most_tokens_per_second_count():
    times = {1: 1.0, 8: 2.4}
    work = [some_reach().work(1 + k) for k in range(8)]
    seconds = [1 + 1.4 * (each - work[0]) / (work[-1] - work[0]) for each in work]
    rates = {k: sum(0.8**i for i in range(k + 1)) / seconds[k] for k in (0, 1, 3, 5, 7)}
    assert chosen(0.8, times) == max(rates, key=rates.__getitem__) == 5


def test_what_was_never_measured_is_tried_in_small_steps():
    times: dict[int, float] = {}
    for most in (1, 3, 5, 7):
        assert chosen(0.9, times) == most
        times[1 + most] = 1.0
    assert chosen(0.9, times) == 7


def test_plain_steps_of_more_sequences_tell_what_drafts_would_cost():
    known = {"acceptance": np.array([0.6]), "verifying": {}, "reach": some_reach()}
    assert choose_drafts(1, np.array([7]), plain={1: 1.0, 8: 1.1}, **known) == 1
    assert choose_drafts(1, np.array([7]), plain={1: 1.0, 2: 2.0, 8: 8.0}, **known) == 0


def test_no_drafts_are_chosen_where_the_steps_that_try_them_are_slower_than_plain_ones():
    assert chosen(0.1, {1: 3.0, 8: 3.0}) == 0


def test_seconds_are_read_between_measured_sizes_and_beyond_them():
    reach = some_reach()
    known = {size: 1 + reach.work(size) for size in (4, 8)}
    for size in (4, 6, 8, 16):
        assert seconds_of(size, known, reach=reach) == pytest.approx(1 + reach.work(size))
    assert seconds_of(1, known, reach=reach) == known[4]


def test_one_slow_step_among_several_does_not_count():
    times = StepTimes()
    for seconds in (1.0, 50.0, 1.1, 0.9, 1.0):
        times.add(3, seconds)
    assert times.known() == {3: 1.0}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_row_comes_to_its_own_share_and_a_new_owner_starts_from_that_of_all(share: float):
    acceptance, rows, owner = Acceptance(4), np.array([2]), np.array([1])
    acceptance.of(rows, owner)
    for i in range(60):
        acceptance.record(rows, np.array([1]), right=np.array([int(share * i) != int(share * (i + 1))]))
    assert acceptance.of(rows, owner)[0] == pytest.approx(share, abs=0.25)
    assert acceptance.of(rows, owner + 1)[0] == pytest.approx(share, abs=0.25)
