"""Tests that end their process: named once, and never run again."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

from tests.support.session.xdist_scheduling import Distribution

COLLECTION = [f"tests/{directory}/test_x.py::test_{number}" for directory in "abc" for number in range(3)]


class Process:
    """A worker process that only notes what it is asked to run."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.asked: list[str] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.asked += [COLLECTION[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def distribution_over(*processes: Process) -> Distribution:
    option = SimpleNamespace(loadscopereorder=False)
    specs = [f"{len(processes)}*popen"]
    distribution = Distribution(SimpleNamespace(getvalue=lambda _: specs, option=option))
    for process in processes:
        distribution.add_node(process)
        distribution.add_node_collection(process, COLLECTION)
    distribution.schedule()
    return distribution


def run(distribution: Distribution, process: Process, *, count: int = len(COLLECTION)) -> None:
    """Run the first `count` tests of a process, with those that it is given meanwhile."""
    for nodeid in islice(process.asked, count):
        distribution.mark_test_complete(process, COLLECTION.index(nodeid))


def test_the_test_that_ended_its_process_is_not_run_again_and_the_others_are():
    first, second = Process(), Process()
    distribution = distribution_over(first, second)
    run(distribution, first, count=1)
    assert distribution.remove_node(first) == first.asked[1]
    successor = Process()
    distribution.add_node(successor)
    distribution.add_node_collection(successor, COLLECTION)
    distribution.schedule()
    run(distribution, second)
    run(distribution, successor)
    assert sorted([*first.asked[:2], *second.asked, *successor.asked]) == COLLECTION
    assert distribution.tests_finished


def test_a_process_that_ended_with_its_last_test_leaves_nothing():
    first, second = Process(), Process()
    distribution = distribution_over(first, second)
    run(distribution, second)
    run(distribution, first, count=2)
    assert distribution.remove_node(first) == first.asked[2]
    assert distribution.tests_finished


def test_a_process_that_finished_its_tests_crashed_in_none():
    first, second = Process(), Process()
    distribution = distribution_over(first, second)
    run(distribution, first)
    assert distribution.remove_node(first) is None
