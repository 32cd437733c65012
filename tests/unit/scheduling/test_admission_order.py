"""Cached prefixes go first, and no sequence waits for ever because of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.scheduling.rank_step import (
    CANDIDATES,
    MIN_PASSES,
    PASSES_PER_WAITING,
    next_to_admit,
    queue_by_priority,
)
from rayserve_moe.scheduling.sequence import Sequence
from tests.support.engine.schedulers import Turns, one, scheduler


def queue_of(*cached: int) -> tuple[deque[Sequence], dict[Sequence, int]]:
    """A queue, and how many tokens each in it finds cached."""
    sequences = [one(f"r{i}", 3) for i in range(len(cached))]
    return deque(sequences), dict(zip(sequences, cached, strict=True))


def place(waiting: deque[Sequence], cached: dict[Sequence, int]) -> int:
    return next_to_admit(waiting, cached_tokens=cached.__getitem__)


def test_the_most_cached_goes_first_and_of_equals_the_one_that_came_first():
    assert place(*queue_of(0, 8, 16, 16)) == 2
    assert place(*queue_of(0, 0, 0)) == 0
    assert place(*queue_of(5)) == 0


def test_the_most_cached_goes_first_from_any_place_in_a_long_queue():
    """Each admission matches few sequences, so the last place is found after several admissions."""
    num_waiting = 40 * CANDIDATES
    waiting, cached = queue_of(*[0] * (num_waiting - 1), 64)
    matched: list[Sequence] = []

    def cached_tokens(sequence: Sequence) -> int:
        matched.append(sequence)
        return cached[sequence]

    for _ in range(num_waiting // CANDIDATES):
        matched.clear()
        found = next_to_admit(waiting, cached_tokens=cached_tokens)
        assert len(matched) <= 3 * CANDIDATES, "a deep queue costs no more than a short one"
    assert found == num_waiting - 1


def test_a_prefix_that_is_evicted_while_its_sequence_waits_loses_its_place():
    waiting, cached = queue_of(*[0] * 3 * CANDIDATES, 64, 32)
    for _ in range(4):
        assert place(waiting, cached) in (0, 3 * CANDIDATES)
    cached[waiting[3 * CANDIDATES]] = 0
    assert place(waiting, cached) == 3 * CANDIDATES + 1


def test_whoever_was_preempted_goes_first():
    waiting, cached = queue_of(0, 64)
    waiting[0].queue.num_to_recompute = 1
    assert place(waiting, cached) == 0


def test_passing_over_ends():
    waiting, cached = queue_of(0, 64)
    waiting[0].queue.num_passed_over = MIN_PASSES - 1
    assert place(waiting, cached) == 1
    waiting[0].queue.num_passed_over = MIN_PASSES
    assert place(waiting, cached) == 0


def test_more_may_pass_where_more_wait():
    num_waiting = 2 * MIN_PASSES
    waiting, cached = queue_of(*[0] * (num_waiting - 1), 64)
    cached[waiting[1]] = 1
    waiting[0].queue.num_passed_over = PASSES_PER_WAITING * num_waiting - 1
    assert place(waiting, cached) == 1
    waiting[0].queue.num_passed_over += 1
    assert place(waiting, cached) == 0


def test_a_stream_of_cached_prompts_starves_nobody():
    """One row; there is always somebody waiting whose prompt is cached."""
    target = scheduler(num_rows=1)
    turns = Turns(target)
    popular, num_passing = [*range(50, 62)], 0
    target.add([one("first", popular, num_new=1)])
    turns.finish()
    patient = one("patient", [*range(70, 90)], num_new=1)
    target.add([patient])
    while patient.finish is None:
        while len(target.waiting) < 3:
            target.add([one(f"popular{num_passing}", popular, num_new=1)])
            num_passing += 1
        turns.turn()
        assert num_passing < 5 * MIN_PASSES, "it waits for ever"
    assert patient.queue.num_passed_over == MIN_PASSES, "it did let others go first"
    turns.finish()


def of_priority(name: str, priority: int) -> Sequence:
    sequence = one(name, 3)
    sequence.request = replace(sequence.request, priority=priority)
    return sequence


@given(priorities=st.lists(st.integers(-2, 2), max_size=12))
def test_who_waits_stands_by_priority_then_in_order_of_arrival(priorities: list[int]):
    waiting: deque[Sequence] = deque()
    for number, priority in enumerate(priorities):
        queue_by_priority(waiting, of_priority(f"r{number}", priority))
    order = [int(sequence.request.request_id[1:]) for sequence in waiting]
    assert order == sorted(range(len(priorities)), key=lambda number: priorities[number])


def test_a_cached_prompt_does_not_overtake_a_smaller_priority():
    waiting = deque([of_priority("a", 0), of_priority("b", 0), of_priority("c", 1)])
    assert place(waiting, dict(zip(waiting, (0, 8, 64), strict=True))) == 1
