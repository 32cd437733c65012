"""Evicted pages in host memory: a bounded number, found by their tokens and namespace alone, and copied once."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.retention import Retention
from rayserve_moe.scheduling.host_pages import HostPages, page_names
from rayserve_moe.scheduling.scheduler import Scheduler, finish_session
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import HostSizes
from tests.support.engine.schedulers import ABORT, Turns, choices, one, result_of, scheduler

PAGE, PROMPT = 4, 33
"""Tokens of a page and of a prompt, eight whole pages."""


def hosted(num_slots: int, *, num_pages: int = 13) -> tuple[Scheduler, HostPages, Turns]:
    """A scheduler with pages for one prompt, and slots for others."""
    target = scheduler(num_pages=num_pages)
    (rank,) = target.ranks
    return target, HostPages(rank, HostSizes(num_slots)), Turns(target)


def prompt(number: int) -> list[int]:
    return np.arange(100 * number, 100 * number + PROMPT).tolist()


def run(turns: Turns, number: int, *, salt: str = "") -> int:
    """Run a request to its end; return the tokens that it found cached."""
    (sequence,) = choices(f"{number}{salt}", prompt(number), num_new=2, salt=salt)
    turns.target.add([sequence])
    turns.finish()
    return sequence.cache.num_cached


def test_an_evicted_prompt_is_restored_and_nothing_is_copied_twice():
    _, host, turns = hosted(100)
    assert [run(turns, number) for number in (1, 2, 1, 2, 1)] == [0, 0, 32, 32, 32]
    assert host.counts.restored > 0 and host.counts.offloaded == host.num_pages <= 2 * PROMPT // PAGE


def test_what_is_slower_to_restore_is_computed():
    _, host, turns = hosted(100)
    host.pays = lambda num_pages: False
    run(turns, 1)
    run(turns, 2)
    assert run(turns, 1) < 32
    assert host.counts.restored == 0 and host.counts.left > 0


def test_hostile_sessions_fill_the_slots_and_no_more():
    _, host, turns = hosted(7)
    for number in range(60):
        run(turns, number, salt=f"tenant {number % 3}")
        host.check_integrity()
        assert host.num_pages <= 7 and len(host.take_moves()[0]) <= 16
    assert host.num_pages == 7


@pytest.mark.slow
def test_many_sessions_with_ttls_of_a_year_take_no_memory():
    """Run 100,000 sessions of three tenants, and end every second session."""
    target = scheduler(num_pages=33, evicts_by_session=True, protected_share=0.5, max_protected_s=3600.0)
    host = HostPages(target.ranks[0], HostSizes(7))
    order, counts = target.ranks[0].tree.order, []
    for number in range(100_000):
        ids = np.random.default_rng(number).integers(3, 1000, 17).astype(np.int32)
        request = GenerationRequest(
            "r",
            ids,
            SamplingParams(max_new_tokens=1),
            cache_salt=f"tenant {number % 3}",
            session=f"session {number}",
            retention=Retention(((17, 31_536_000.0),)),
        )
        target.add([Sequence(request, 0, seed=5, stop_token_ids=frozenset())])
        schedule = target.schedule()
        _, (ended,) = target.commit(schedule, result_of(schedule))
        target.release(ended)
        if number % 2:
            finish_session(target, f"session {number}")
        assert len(host.take_moves()[0]) <= 16 and host.num_pages <= 7
        assert order.num_protected <= 16
        if number % 20_000 == 19_999:
            target.check_integrity()
            host.check_integrity()
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert host.num_pages == 7
    assert max(counts) - counts[0] < 1000, counts


def test_other_salts_find_nothing():
    _, host, turns = hosted(100)
    run(turns, 1, salt="a")
    run(turns, 2)
    assert host.num_pages and run(turns, 1, salt="b") == 0


def test_choices_of_their_own_namespace_are_not_kept():
    target = scheduler(num_pages=13, caches_prefixes=False)
    host, turns = HostPages(target.ranks[0], HostSizes(9)), Turns(target)
    for number in range(3):
        run(turns, number)
    assert host.num_pages == 0


def test_an_aborted_request_leaves_its_pages_cached():
    target, host, turns = hosted(100)
    run(turns, 1)
    run(turns, 2)
    again = one("again", prompt(1), num_new=2)
    turns.begin(again)
    assert len(host.arriving), "no page is on its way"
    target.end(again, ABORT)
    target.release(again)
    turns.turn()
    assert not len(host.arriving) and target.ranks[0].num_available == target.ranks[0].allocator.num_usable


def test_a_flush_drops_all_pages_and_those_on_their_way():
    target, host, turns = hosted(100)
    run(turns, 1)
    run(turns, 2)
    turns.begin(one("again", prompt(1), num_new=2))
    target.flush()
    assert not len(host.arriving) and host.num_pages == 0
    turns.finish()


def test_a_name_depends_on_all_tokens_up_to_the_end_of_its_page():
    run = np.arange(40, dtype=np.int32)
    names = page_names(("",), run.tobytes(), page_bytes=4 * PAGE)
    assert len(set(names)) == 10 and page_names(("",), run.tobytes(), page_bytes=4 * PAGE, first=7) == names[7:]
    assert not set(names) & set(page_names(("salt",), run.tobytes(), page_bytes=4 * PAGE))
    for place in range(40):
        changed = run.copy()
        changed[place] += 1
        others = page_names(("",), changed.tobytes(), page_bytes=4 * PAGE)
        assert [ours == other for ours, other in zip(names, others, strict=True)] == [
            page < place // PAGE for page in range(10)
        ]
