"""Cached prefixes go first, and no sequence waits for ever because of it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.waiting_queue import (
    CANDIDATES,
    MIN_PASSES,
    PASSES_PER_WAITING,
    UNMATCHED,
    WaitingQueue,
    next_to_admit,
)
from tests.support.engine.schedulers import Turns, one, scheduler


def queue_of(*cached: int) -> tuple[WaitingQueue, dict[Sequence, int]]:
    """A queue, and how many tokens each in it finds cached."""
    sequences = [one(f"r{i}", 3) for i in range(len(cached))]
    return WaitingQueue(sequences), dict(zip(sequences, cached, strict=True))


def place(waiting: WaitingQueue, cached: dict[Sequence, int]) -> int:
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
    waiting = WaitingQueue()
    for number, priority in enumerate(priorities):
        waiting.add(of_priority(f"r{number}", priority))
    order = [int(sequence.request.request_id[1:]) for sequence in waiting]
    assert order == sorted(range(len(priorities)), key=lambda number: priorities[number])


def test_a_cached_prompt_does_not_overtake_a_smaller_priority():
    waiting = WaitingQueue([of_priority("a", 0), of_priority("b", 0), of_priority("c", 1)])
    assert place(waiting, dict(zip(waiting, (0, 8, 64), strict=True))) == 1


@given(changes=st.lists(st.tuples(st.sampled_from(["add", "first", "remove"]), st.integers(-2, 2)), max_size=200))
def test_cached_tokens_follow_their_sequence_through_the_queue(changes: list[tuple[str, int]]):
    waiting, wanted, known = WaitingQueue(), list[Sequence](), dict[Sequence, int]()
    for number, (change, value) in enumerate(changes):
        if change == "remove" and wanted:
            waiting.remove(wanted.pop(value % len(wanted)))
        elif change != "remove":
            sequence = of_priority(f"r{number}", value)
            place = 0
            if change == "add":
                place = 1 + max((at for at, other in enumerate(wanted) if other.request.priority <= value), default=-1)
            wanted.insert(place, sequence)
            waiting.add(sequence) if change == "add" else waiting.insert(0, sequence)
            assert waiting.num_cached[place] == UNMATCHED
            waiting.num_cached[place] = known[sequence] = number
        assert list(waiting) == wanted and waiting.num_cached.tolist() == [known[each] for each in wanted]
        priorities = [each.request.priority for each in wanted]
        changes_at = (place for place, other in enumerate(priorities) if other != priorities[0])
        assert not wanted or waiting.num_equal == next(changes_at, len(wanted))


@given(data=st.data())
def test_candidates_are_the_front_the_unmatched_and_those_with_the_most(data: st.DataObject):
    known = data.draw(st.lists(st.sampled_from([UNMATCHED, -1, 0, 16, 32, 48]), min_size=1, max_size=60))
    places = range(len(known))
    most = sorted(places, key=lambda place: 0 if known[place] == UNMATCHED else known[place], reverse=True)
    unmatched = [place for place in places if known[place] == UNMATCHED]
    wanted = {*places[:CANDIDATES], *unmatched[:CANDIDATES], *most[:CANDIDATES]}
    waiting, matched = WaitingQueue(one(f"r{place}", 3) for place in places), []
    waiting.num_cached[:] = known

    def cached_tokens(sequence: Sequence) -> int:
        matched.append(int(sequence.request.request_id[1:]))
        return data.draw(st.integers(-1, 3))

    found = next_to_admit(waiting, cached_tokens=cached_tokens)
    assert set(matched) == (wanted if len(known) > 1 else set())
    if matched:
        counts = waiting.num_cached[matched].tolist()
        assert found == matched[counts.index(max(counts))]
