"""How sequences spread over data-parallel ranks."""

from __future__ import annotations

from rayserve_moe.scheduling.scheduler import Schedule, Scheduler
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
