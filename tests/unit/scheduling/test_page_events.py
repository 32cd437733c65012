"""What a scheduler records for whoever follows its prefix cache."""

from __future__ import annotations

import numpy as np

from rayserve_moe.scheduling import page_events
from rayserve_moe.scheduling.page_digests import prompt_digests
from rayserve_moe.scheduling.page_events import PageEvents, PagesAdded, PagesCleared, PagesRemoved, WeightsNamed
from rayserve_moe.scheduling.rank_step import StepLimits
from rayserve_moe.scheduling.scheduler import Scheduler, change_weights, rename_weights, watch_pages

LIMITS = StepLimits(
    num_rows=2, step_tokens=32, chunk_tokens=32, page_size=2, num_pages=8, max_tokens=16, num_data_ranks=2
)


def scheduler_with_pages() -> Scheduler:
    """Three pages of two branches on rank 1."""
    scheduler = Scheduler(LIMITS)
    tree, allocator = scheduler.ranks[1].tree, scheduler.ranks[1].allocator
    for last in (3, 4):
        pages = allocator.allocate(2)
        assert pages is not None
        tree.insert(("",), np.array([1, 1, last, last], np.int32), page_ids=pages)
        allocator.release(pages)
    return scheduler


def test_what_is_cached_already_is_recorded_first_and_from_the_root_on():
    scheduler, events = scheduler_with_pages(), PageEvents(lambda: None)
    watch_pages(scheduler, events)
    named, *added = events.take(10)
    assert named == (0, WeightsNamed("0"))
    assert [rank for rank, _ in added] == [1, 1, 1] and all(isinstance(change, PagesAdded) for _, change in added)
    known = {0}
    for _, change in added:
        assert change.above in known
        known |= set(change.page_ids.tolist())
    assert known - {0} == set(scheduler.ranks[1].tree.held_page_ids().tolist())


def test_a_change_of_weights_is_a_clear_of_every_rank_under_the_new_version():
    scheduler, events = scheduler_with_pages(), PageEvents(lambda: None)
    watch_pages(scheduler, events)
    events.take(10)
    change_weights(scheduler, "7")
    assert events.take(10) == [(0, WeightsNamed("7")), (0, PagesCleared()), (1, PagesCleared())]
    rename_weights(scheduler, "8")
    assert events.take(10) == [(0, WeightsNamed("8"))]


def test_eviction_names_the_pages_that_go_and_a_split_nothing():
    scheduler, events = scheduler_with_pages(), PageEvents(lambda: None)
    watch_pages(scheduler, events)
    events.take(10)
    tree = scheduler.ranks[1].tree
    held = set(tree.held_page_ids().tolist())
    tree.match(("",), np.array([1, 1, 9], np.int32))
    assert events.take(10) == []
    tree.evict(1)
    ((rank, change),) = events.take(10)
    assert rank == 1 and isinstance(change, PagesRemoved)
    assert set(change.page_ids.tolist()) == held - set(tree.held_page_ids().tolist())


def test_one_wake_covers_all_that_waits():
    wakes = []
    events = PageEvents(lambda: wakes.append(None))
    for _ in range(3):
        events.record(0, PagesCleared())
    assert len(wakes) == 1 and len(events.take(2)) == 2 and len(events.take(2)) == 1
    events.record(0, PagesCleared())
    assert len(wakes) == 2


def test_a_reader_that_has_died_costs_bounded_memory(monkeypatch):
    monkeypatch.setattr(page_events, "MAX_RECORDS", 4)
    events = PageEvents(lambda: None)
    for _ in range(9):
        events.record(0, PagesCleared())
    assert events.is_overrun and events.take(100) == []


def test_a_prompt_is_named_without_its_last_token_and_by_its_salt():
    ids = np.arange(1, 10, dtype=np.int32)
    named = prompt_digests(b"key", "", token_ids=ids, page_size=4)
    assert [len(prompt_digests(b"key", "", token_ids=ids[:n], page_size=4)) for n in (0, 1, 4, 5, 8, 9)] == [
        0,
        0,
        0,
        1,
        1,
        2,
    ]
    assert named[:1] == prompt_digests(b"key", "", token_ids=ids[:5], page_size=4)
    for other in (
        prompt_digests(b"key", "s", token_ids=ids, page_size=4),
        prompt_digests(b"yek", "", token_ids=ids, page_size=4),
    ):
        assert not set(named) & set(other)
