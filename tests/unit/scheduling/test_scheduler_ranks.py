"""How sequences spread over data-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

from rayserve_moe.scheduling.scheduler import Schedule, Scheduler
from rayserve_moe.scheduling.sequence import Sequence
from tests.support.engine.schedulers import Turns, one, scheduler


def rows_by_rank(target: Scheduler, schedule: Schedule) -> list[int]:
    per_rank = len(target.table.sequences) // len(target.ranks)
    return (schedule.plan.chunks.rows // per_rank).tolist()


def test_sequences_spread_over_data_ranks_each_with_a_budget_of_its_own():
    target = scheduler(num_data_ranks=2, step_tokens=32, num_rows=2)
    for i in range(4):
        target.add([one(f"r{i}", [100 * i + j for j in range(20)])])
    schedule = target.schedule()
    assert rows_by_rank(target, schedule) == [0, 1]
    assert rows_by_rank(target, target.schedule()) == [0, 0, 1, 1], "the chunks of a rank stand together"
    assert {s.data_rank for s in target.running} == {0, 1} and not target.waiting


def test_a_prompt_goes_to_the_rank_that_has_it_cached_and_elsewhere_where_that_is_full():
    target = scheduler(num_data_ranks=2, num_rows=1)
    turns = Turns(target, overlaps=False)
    first = one("first", 13, num_new=1)
    target.add([first])
    turns.finish()
    second, third = one("second", 13, num_new=4), one("third", 13, num_new=4)
    for sequence in (second, third):
        target.add([sequence])
        turns.turn()
    assert (second.data_rank, second.cache.num_cached) == (first.data_rank, 12)
    assert (third.data_rank, third.cache.num_cached) == (1 - first.data_rank, 0)
    turns.finish()


def busy_ranks(*, num_left: int) -> tuple[Scheduler, Turns, Sequence]:
    """Two ranks, one of which has cached 36 tokens and computes a prompt with `num_left` more, 32 in a step."""
    target = scheduler(num_data_ranks=2, step_tokens=32, chunk_tokens=32)
    turns = Turns(target, overlaps=False)
    first = one("first", 37, num_new=1)
    target.add([first])
    turns.finish()
    long = one("long", 36 + num_left, num_new=1)
    target.add([long])
    turns.turn()
    assert (long.data_rank, long.cache.num_cached) == (first.data_rank, 36)
    return target, turns, long


def test_a_rank_without_budget_holds_up_only_those_that_wait_for_it():
    target, turns, long = busy_ranks(num_left=48)
    sibling, other = one("sibling", [*range(10, 46), *range(200, 210)], num_new=1), one("other", [*range(300, 310)])
    for sequence in (sibling, other):
        target.add([sequence])
    assert "other/0" in turns.turn() and other.data_rank != long.data_rank
    assert list(target.waiting) == [sibling], "its rank computes 16 more tokens, and the other would compute 36"
    turns.finish()
    assert (sibling.data_rank, sibling.cache.num_cached) == (long.data_rank, 36)


def test_a_prompt_does_not_wait_for_a_rank_that_is_busy_for_longer_than_its_cached_tokens_save():
    target, turns, long = busy_ranks(num_left=80)
    sibling = one("sibling", [*range(10, 46), *range(200, 210)], num_new=1)
    target.add([sibling])
    turns.turn()
    assert (sibling.data_rank, sibling.cache.num_cached) == (1 - long.data_rank, 0)
    turns.finish()


def test_a_larger_priority_number_is_not_admitted_past_a_sequence_that_waits_for_its_rank():
    target, turns, _ = busy_ranks(num_left=48)
    sibling, other = one("sibling", [*range(10, 46), *range(200, 210)], num_new=1), one("other", [*range(300, 310)])
    other.request = replace(other.request, priority=1)
    for sequence in (sibling, other):
        target.add([sequence])
    turns.turn()
    assert list(target.waiting) == [sibling, other]
    turns.finish()
