"""Overlapped or not, a turn brings the same, and results are never mistaken for those of another step."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.loop import cycle_with
from rayserve_moe.scheduling.step_plan import Chunks, StepPlan
from tests.support.devices.counting_executor import CountingExecutor
from tests.support.engine.schedulers import ABORT, choices, one, scheduler


def cycle_over(executor: CountingExecutor | None = None, *, overlaps: bool = True, **limits: object) -> StepCycle:
    executor = executor or CountingExecutor()
    return cycle_with(scheduler(**limits), executor, overlaps=overlaps)


def finish(cycle: StepCycle) -> int:
    """Turn until nothing is left; returns the number of turns."""
    num_turns = 0
    while cycle.has_work:
        cycle.run()
        cycle.scheduler.check_integrity()
        num_turns += 1
        assert num_turns < 1000, "the requests do not come to an end"
    return num_turns


@pytest.mark.parametrize(
    ("overlaps", "expected"),
    [(True, [(0, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 1)]), (False, [(1, 1, 0), (1, 2, 0), (1, 3, 1)])],
)
def test_a_turn_brings_the_result_of_the_step_before_or_its_own(overlaps: bool, expected: list[tuple]):
    cycle = cycle_over(overlaps=overlaps)
    sequence = one("a", [7], num_new=3)
    cycle.scheduler.add([sequence])
    seen = []
    while cycle.has_work:
        rows, ended = cycle.run()
        seen.append((len(rows), sequence.num_outputs, len(ended)))
    assert seen == expected


@pytest.mark.parametrize("num_pages", [64, 9])
def test_what_comes_out_does_not_depend_on_overlap(num_pages: int):
    outcomes = []
    for overlaps in (True, False):
        cycle = cycle_over(overlaps=overlaps, num_pages=num_pages)
        groups = [choices(f"r{i}", [100 * i + j for j in range(1 + 3 * i)], n=1 + i % 2) for i in range(6)]
        for group in groups:
            cycle.scheduler.add(group)
        finish(cycle)
        outcomes.append([(s.token_ids[: s.num_tokens].tolist(), s.finish) for group in groups for s in group])
        assert (cycle.scheduler.num_preemptions > 0) == (num_pages == 9)
    assert outcomes[0] == outcomes[1]
    for tokens, _ in outcomes[0]:
        assert np.diff(tokens).tolist() == [1] * (len(tokens) - 1), "each sequence counts on from its own prompt"


def test_an_abort_takes_the_tokens_that_are_known_and_drops_the_one_on_its_way():
    cycle = cycle_over()
    gone, stays = one("gone", [7], num_new=9), one("stays", [70], num_new=9)
    for sequence in (gone, stays):
        cycle.scheduler.add([sequence])
    for _ in range(4):
        cycle.run()
    assert cycle.end(gone, ABORT) is gone
    assert gone.token_ids[1 : gone.num_tokens].tolist() == [8, 9, 10]
    assert len(gone.pages) == 0
    finish(cycle)
    assert gone.num_outputs == 3 and stays.token_ids[1 : stays.num_tokens].tolist() == list(range(71, 80))


def test_work_is_left_until_the_last_result_is_in():
    cycle = cycle_over()
    sequence = one("a", [7], num_new=1)
    cycle.scheduler.add([sequence])
    cycle.run()
    cycle.end(sequence, ABORT)
    assert not cycle.scheduler.has_work and cycle.has_work, "a result is on its way"
    rows, ended = cycle.run()
    assert len(rows) == 0 and ended == [] and not cycle.has_work


def test_a_result_of_another_step_is_our_own_fault():
    executor = CountingExecutor()
    cycle = cycle_over(executor)
    cycle.scheduler.add([one("a", [7])])
    cycle.run()
    executor.execute(StepPlan(step_id=-1))
    executor.execute(StepPlan(-1, Chunks(*(np.array([value]) for value in (0, 0, 1, 7, True)))))
    with pytest.raises(AssertionError, match="belongs to another step"):
        cycle.run()


def test_the_clock_counts_steps_and_tokens():
    cycle = cycle_over(chunk_tokens=8)
    cycle.scheduler.add([one("a", 20, num_new=5)])
    cycle.scheduler.add([one("b", [70], num_new=5)])
    finish(cycle)
    clock = cycle.statistics()
    assert clock["steps"] == 7 and clock["tokens_sampled"] == 10
    assert clock["tokens_computed"] == 20 + 4 + 1 + 4, "of each answer all but the last token"
    assert all(clock[f"{part}_s"] >= 0 for part in ("schedule", "commit"))
