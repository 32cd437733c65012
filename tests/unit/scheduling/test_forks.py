"""Choices that fork off a prompt: when, with which rows and pages, and what becomes of them when others leave."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.execution.step.page_copies import MAX_COPIES, copy_vectors
from rayserve_moe.scheduling.sequence import NO_ROW
from tests.support.engine.schedulers import Turns, abort, all_pages_are_free, choices, one, result_of, scheduler


def test_a_plan_names_forks_after_what_they_fork_off():
    target = scheduler()
    target.add(choices("a", 6, n=3))
    plan = target.schedule().plan
    assert plan.chunks.lengths.tolist() == [6, 0, 0] and plan.chunks.starts.tolist() == [0, 6, 6]
    assert plan.chunks.num_forks == 2 and plan.has_blocks and plan.chunks.sources.tolist() == [0, 0, 0]
    (vector,) = copy_vectors(plan, rows_per_rank=4)
    rows = plan.chunks.rows.tolist()
    assert vector.reshape(MAX_COPIES, 4)[:3].tolist() == [[0, rows[0], row, 6] for row in rows[1:]] + [[-1, 0, 0, 0]]


def test_a_single_token_that_ends_a_prompt_takes_no_blocks_with_its_forks():
    target = scheduler()
    turns = Turns(target)
    turns.begin(one("first", 5))
    turns.turn()
    target.add(choices("a", 5, n=3))
    schedule = target.schedule()
    lengths = schedule.plan.chunks.lengths.tolist()
    assert sorted(lengths) == [0, 0, 1, 1] and not schedule.plan.has_blocks


def test_forks_of_a_continued_prompt_stand_behind_it_and_before_what_decodes():
    target = scheduler(chunk_tokens=8, num_rows=5)
    turns = Turns(target)
    turns.begin(one("old", [*range(200, 205)], num_new=40), num_turns=2)
    target.add(choices("a", 14, n=3))
    turns.turn()
    assert target.schedule().plan.chunks.lengths.tolist() == [6, 0, 0, 1]


@pytest.mark.parametrize("limits", [{"num_rows": 3}, {"num_pages": 5}])
def test_choices_for_which_rows_or_pages_are_short_follow_the_prompt(limits):
    target = scheduler(**limits)
    turns = Turns(target)
    group = choices("a", 6, n=5, num_new=2)
    target.add(group)
    assert turns.turn() == {"a/0": 6, "a/1": 0, "a/2": 0}
    turns.settle()
    assert [(choice.row == NO_ROW, choice in target.waiting) for choice in group[3:]] == [(True, True)] * 2
    turns.finish()
    assert [choice.num_outputs for choice in group] == [2] * 5
    assert [choice.cache.num_cached for choice in group] == [0, 6, 6, 4, 4]


def test_nobody_forks_ahead_of_what_was_preempted():
    target = scheduler(chunk_tokens=8, num_rows=3)
    turns = Turns(target)
    old, group = one("old", [*range(200, 209)], num_new=30), choices("a", 14, n=3)
    turns.begin(old, num_turns=3)
    target.add(group)
    turns.turn()
    target.preempt(old)
    assert turns.turn().keys() == {"a/0", "old/0", "a/1"}


@pytest.mark.parametrize("leaving", ["a/0", "a/1"])
@pytest.mark.parametrize("way", ["preempted", "aborted"])
def test_pages_of_a_prompt_stay_while_some_choice_uses_them(leaving, way):
    """Whoever leaves before the step is committed has them cached, and the others keep them locked."""
    target = scheduler(num_pages=10, num_rows=3)
    group = choices("a", 10, n=3, num_new=6)
    target.add(group)
    in_flight = target.schedule()
    (gone,) = [choice for choice in group if f"a/{choice.choice_index}" == leaving]
    others = [choice for choice in group if choice is not gone]
    shared = others[0].pages[:2].copy()
    if way == "preempted":
        target.preempt(gone)
    else:
        abort(target, gone)
    target.check_integrity()
    assert target.ranks[0].take_pages(9) is None
    assert np.array_equal(others[0].pages[:2], shared) and np.array_equal(others[1].pages[:2], shared)
    target.commit(in_flight, result_of(in_flight))
    target.check_integrity()
    assert [choice.num_outputs for choice in others] == [1, 1]
    Turns(target).finish()
    target.flush()
    assert all_pages_are_free(target)


def test_what_another_choice_has_not_computed_yet_is_not_cached_when_the_first_one_ends():
    """Its rows were flushed meanwhile, so that the other computes the prompt anew, chunk by chunk."""
    target = scheduler(num_rows=2, chunk_tokens=6)
    turns = Turns(target)
    old = one("old", [*range(200, 205)], num_new=40)
    turns.begin(old)
    first, second = group = choices("a", 12, n=2)
    target.add(group)
    for _ in range(3):
        turns.turn()
    target.flush()
    abort(target, old)
    assert turns.turn()["a/1"] == 6 and second.num_computed == 6
    abort(target, first)
    asking = one("b", 12)
    asking.cache.namespace = second.cache.namespace
    assert target.ranks[0].num_cached(asking) <= 4
    turns.finish()


def test_a_failed_prompt_is_not_cached_by_its_forks():
    target = scheduler()
    group = choices("a", 10, n=3)
    target.add(group)
    in_flight = target.schedule()
    _, ended = target.commit(in_flight, result_of(in_flight, not_finite=(0, 1, 2)))
    for sequence in ended:
        target.release(sequence)
    target.check_integrity()
    assert len(ended) == 3 and all_pages_are_free(target)
