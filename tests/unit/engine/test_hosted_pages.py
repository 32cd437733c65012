"""Pages are restored where that is faster than to compute them, by the times of steps and copies so far."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.engine.executor import GroupLayout
from rayserve_moe.engine.extension import ReplacedHosts
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.scheduling.host_pages import RESTORED_PAGES, HostPages
from rayserve_moe.scheduling.plan_builder import Schedule, empty_schedule
from rayserve_moe.scheduling.step_plan import Chunks, CopyTimes, HostSizes, StepPlan, StepResult
from tests.support.engine.schedulers import scheduler

PAGE = 4


class Timed:
    """Return hosted pages on a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        target = scheduler(page_size=PAGE)
        self.hosted = HostedPages(target, HostSizes(9), clock=lambda: self.now)
        assert target.ranks[0].host is not None
        self.host: HostPages = target.ranks[0].host

    def step(self, seconds: float, *, num_tokens: int, moved: int = 0, move_s: float = 0.0) -> None:
        """Run a step with a prompt chunk."""
        chunks = Chunks(np.zeros(1, np.intp), np.zeros(1, np.intp), np.array([num_tokens]), np.zeros(num_tokens))
        schedule = empty_schedule(StepPlan(1, chunks))
        self.hosted.submitted(schedule)
        self.now += seconds
        nothing = np.zeros(0)
        result = StepResult(1, nothing, nothing, nothing, copied=CopyTimes(moved, move_s))
        self.hosted.returned(schedule, result, counts=None)


def test_pages_are_restored_until_times_are_known():
    timed = Timed()
    assert timed.host.pays(1)
    timed.step(0.1, num_tokens=10)
    assert timed.host.pays(1)


@pytest.mark.parametrize(("page_s", "num_pages", "pays"), [(0.01, 3, False), (0.01, 4, True), (0.05, 100, False)])
def test_the_faster_way_is_taken(page_s: float, num_pages: int, pays: bool):
    """A page takes 0.04 s to compute, and a restored sequence waits a step of 0.1 s longer."""
    timed = Timed()
    timed.step(0.1, num_tokens=10, moved=2, move_s=2 * page_s)
    assert timed.host.pays(num_pages) is pays


def test_lost_steps_are_forgotten():
    timed = Timed()
    lost: Schedule = empty_schedule(StepPlan(7))
    timed.hosted.submitted(lost)
    timed.hosted.reset(ReplacedHosts(GroupLayout()))
    timed.now = 100.0
    timed.step(0.1, num_tokens=10, moved=1, move_s=0.01)
    assert timed.host.pays(4)


def test_plans_without_copies_stay_as_they_are():
    timed, schedule = Timed(), empty_schedule(StepPlan(1))
    assert timed.hosted.plan(schedule, None) is schedule
    assert timed.hosted.statistics()["host_pages_total"] == 9


def test_slow_copies_leave_a_plan_the_pages_of_one_program():
    timed = Timed()
    for _ in range(20):
        timed.step(0.02, num_tokens=10, moved=1, move_s=0.3)
    assert timed.host.max_restored == RESTORED_PAGES
