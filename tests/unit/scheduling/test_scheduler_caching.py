"""What is found cached: by others, by choices of one request, by whoever was preempted; and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.sequence import Sequence
from tests.support.engine.schedulers import TOKEN, Turns, abort, all_pages_are_free, choices, one, result_of, scheduler


def found(target: Scheduler, prompt: int | list[int] | np.ndarray) -> int:
    """How much of a prompt would be found cached on the first data rank."""
    sequence = one("probe", prompt)
    target.add([sequence])
    target.waiting.remove(sequence)
    return target.ranks[0].num_cached(sequence)


def flushed_in_flight() -> tuple[Scheduler, Turns, Sequence]:
    """A sequence that has computed three pages, and a flush since."""
    target = scheduler(page_size=4)
    turns, sequence = Turns(target), one("a", 13, num_new=20)
    turns.begin(sequence, num_turns=3)
    target.flush()
    return target, turns, sequence


def test_whoever_comes_back_finds_its_pages_and_computes_the_rest():
    target = scheduler(page_size=4)
    turns = Turns(target)
    sequence = one("a", 9)
    turns.begin(sequence, num_turns=4)
    turns.settle()
    assert sequence.num_tokens == 13
    target.preempt(sequence)
    schedule = target.schedule()
    assert schedule.plan.chunks.starts.tolist() == [12] and schedule.plan.chunks.token_ids.tolist() == [TOKEN]
    assert sequence.cache.num_cached == 0, "that counts what others had computed"
    assert sequence.cache.origins == ()


def test_whoever_comes_back_after_its_pages_went_is_computed_anew():
    target = scheduler()
    turns = Turns(target)
    sequence = one("a", 5)
    turns.begin(sequence, num_turns=3)
    turns.settle()
    target.preempt(sequence)
    target.flush()
    schedule = target.schedule()
    assert turns.lengths(schedule) == {"a/0": 8}
    np.testing.assert_array_equal(schedule.plan.chunks.token_ids, [10, 11, 12, 13, 14, TOKEN, TOKEN, TOKEN])
    assert schedule.plan.chunks.samples.tolist() == [True]
    np.testing.assert_array_equal(schedule.plan.sampling.rows, [sequence.row])
    assert sequence.cache.origins == ((0, 5, "recomputed"),)


def test_a_prompt_that_is_computed_again_is_remembered_as_such():
    target = scheduler(chunk_tokens=32, page_size=4)
    turns = Turns(target)
    sequence = one("a", 70, num_new=4)
    turns.begin(sequence)
    for forgets in (True, False, True):
        turns.settle()
        target.preempt(sequence)
        if forgets:
            target.flush()
        turns.turn()
    assert sequence.cache.origins == ((0, 32, "recomputed"), (0, 64, "recomputed"))
    turns.finish()


def test_what_others_computed_meanwhile_is_cached_and_not_computed():
    target = scheduler(chunk_tokens=8, page_size=4)
    turns = Turns(target)
    first = one("first", 30, num_new=1)
    turns.begin(first)
    target.preempt(first)
    target.waiting.clear()
    target.add([one("other", 30, num_new=1)])
    turns.finish()
    target.waiting.add(first)
    turns.finish()
    assert first.cache.origins == ((8, 28, "cached"),) and first.cache.num_cached == 0


def test_choices_share_the_whole_pages_of_their_prompt():
    target = scheduler(page_size=4)
    turns = Turns(target)
    group = choices("a", 10, n=3)
    target.add(group)
    assert turns.turn() == {"a/0": 10, "a/1": 0, "a/2": 0}
    assert turns.turn() == {"a/0": 1, "a/1": 1, "a/2": 1}
    assert all(choice.pages[:2].tolist() == group[0].pages[:2].tolist() for choice in group)
    assert len({int(choice.pages[2]) for choice in group}) == 3, "the page that each writes to is its own"
    assert [choice.cache.num_cached for choice in group] == [0, 10, 10]


def test_at_least_one_token_of_a_shared_prompt_is_left_to_compute():
    target = scheduler(page_size=4)
    turns = Turns(target, overlaps=False)
    first, second = one("a", 8), one("b", 8)
    target.add([first])
    turns.turn()
    target.add([second])
    assert turns.turn() == {"a/0": 1, "b/0": 4}
    assert second.cache.num_cached == 4


def test_choices_find_what_an_aborted_first_one_had_computed():
    target = scheduler(chunk_tokens=8, page_size=4)
    turns = Turns(target)
    group = choices("a", 20, n=2)
    target.add(group)
    turns.turn()
    abort(target, group[0])
    turns.turn()
    assert group[1].cache.num_cached == 8
    turns.finish()


@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_requests_share_prefixes_where_that_is_on_and_choices_always(caches_prefixes: bool):
    target = scheduler(caches_prefixes=caches_prefixes)
    turns = Turns(target)
    groups = [choices(name, 13, n=2) for name in "ab"]
    for group in groups:
        target.add(group)
        turns.finish()
    found = 12 if caches_prefixes else 0
    assert [[choice.cache.num_cached for choice in group] for group in groups] == [[0, 13], [found, 13]]
    assert all_pages_are_free(target) == (not caches_prefixes), "what nobody may find is not kept"


def test_salts_keep_requests_apart():
    target = scheduler()
    turns = Turns(target)
    group = [one(f"r{i}", 13, salt=salt) for i, salt in enumerate(["", "x", "x", ""])]
    for sequence in group:
        target.add([sequence])
        turns.finish()
    assert [sequence.cache.num_cached for sequence in group] == [0, 0, 12, 12]


def test_an_answer_is_found_by_the_next_turn_of_its_conversation():
    target = scheduler(page_size=4)
    turns = Turns(target)
    first = one("first", 10, num_new=7)
    target.add([first])
    turns.finish()
    conversation = first.token_ids[: first.num_tokens].tolist()
    second = one("second", [*conversation, 60, 61, 62])
    turns.begin(second)
    assert second.cache.num_cached == 16, "17 tokens, the last of which was sampled and never computed"
    turns.finish()


def test_cached_pages_make_room_before_anyone_is_preempted():
    target = scheduler(page_size=4, num_pages=1 + 8)
    turns = Turns(target)
    for i in range(5):
        target.add([one(f"r{i}", [100 * i + j for j in range(20)], num_new=8)])
        turns.finish()
    assert target.num_preemptions == 0
    assert 0 < target.ranks[0].tree.num_cached_pages <= 8


def test_logits_that_are_not_finite_end_their_sequence_only_and_are_not_cached():
    target = scheduler()
    bad, good = one("bad", [*range(50, 59)]), one("good", 9)
    for sequence in (bad, good):
        target.add([sequence])
    schedule = target.schedule()
    assert target.commit(schedule, result_of(schedule, not_finite=(0,)))[1] == [bad]
    target.release(bad)
    assert bad.finish is not None and bad.finish.kind == "error" and bad.num_outputs == 0
    assert good.finish is None and good.num_outputs == 1
    assert [found(target, prompt) for prompt in ([*range(50, 60)], 10)] == [0, 8]


def test_what_runs_goes_on_after_a_flush_but_is_not_found():
    target, turns, sequence = flushed_in_flight()
    late = one("late", 13, num_new=1)
    turns.begin(late)
    assert late.cache.num_cached == 0
    turns.finish()
    assert sequence.num_outputs == 20
    assert found(target, sequence.token_ids[:30]) == 12, "of the prompt that was computed since, and no more"


def test_a_prompt_in_flight_is_not_cached_by_the_result_after_a_flush():
    target = scheduler()
    target.add([one("a", 13)])
    schedule = target.schedule()
    target.flush()
    target.commit(schedule, result_of(schedule))
    assert found(target, 13) == 0
    target.add([one("b", 13)])
    schedule = target.schedule()
    target.commit(schedule, result_of(schedule))
    assert found(target, 13) == 12
