"""Who runs, who waits, who gives way. The laws that hold in every state are in `tests/properties`."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.requests import FinishReason
from rayserve_moe.scheduling.scheduler import Schedule, Scheduler
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED
from tests.support.scheduling import STOP_TOKEN_ID, TOKEN, Turns, choices, one, result_of, scheduler

ABORT = FinishReason("abort")


def abort(target: Scheduler, sequence: Sequence) -> None:
    target.end(sequence, ABORT)
    target.release(sequence)
    target.check_integrity()


def all_pages_are_free(target: Scheduler) -> bool:
    return all(rank.allocator.num_free == rank.allocator.num_usable for rank in target.ranks)


def test_decoding_and_prompts_share_a_step():
    target = scheduler(chunk_tokens=16)
    turns = Turns(target)
    target.add([one("a", 5)])
    assert turns.turn() == {"a/0": 5}
    target.add([one("b", [*range(100, 140)])])
    assert turns.turn() == {"a/0": 1, "b/0": 16}
    assert turns.turn() == {"a/0": 1, "b/0": 16}
    assert turns.turn() == {"a/0": 1, "b/0": 8}
    assert turns.turn() == {"a/0": 1, "b/0": 1}


def test_a_step_is_filled_in_the_order_of_arrival():
    target = scheduler(step_tokens=32)
    turns = Turns(target)
    for i, name in enumerate("abc"):
        target.add([one(name, [*range(100 * i, 100 * i + 20)])])
    assert turns.turn() == {"a/0": 20}
    assert turns.turn() == {"a/0": 1, "b/0": 20}
    assert turns.turn() == {"a/0": 1, "b/0": 1, "c/0": 20}


def test_only_the_chunk_that_ends_a_prompt_samples():
    target = scheduler(chunk_tokens=16)
    target.add([one("a", 33)])
    assert [target.schedule().plan.chunk_samples.tolist() for _ in range(3)] == [[False], [False], [True]]


def test_a_sequence_goes_on_from_the_token_that_is_on_its_way():
    target = scheduler()
    sequence = one("a", 5, num_new=4)
    target.add([sequence])
    ahead = [target.schedule() for _ in range(5)]
    assert [schedule.plan.chunk_starts.tolist() for schedule in ahead] == [[0], [5], [6], [7], []]
    assert [schedule.plan.token_ids.tolist() for schedule in ahead[1:4]] == [[LAST_SAMPLED]] * 3
    for i, schedule in enumerate(ahead[:4]):
        commit = target.commit(schedule, result_of(schedule, 40 + i))
    assert commit.ended == [sequence] and sequence.tokens(5, 9).tolist() == [40, 41, 42, 43]


def test_nothing_is_computed_beyond_the_last_token_that_is_wanted():
    target = scheduler()
    sequences = [one(f"r{num_new}", [num_new] * 5, num_new=num_new) for num_new in (0, 1, 2)]
    for sequence in sequences:
        target.add([sequence])
    first, second, third = (target.schedule() for _ in range(3))
    assert first.plan.num_chunks == 3 and first.plan.chunk_samples.tolist() == [False, True, True]
    assert second.plan.chunk_rows.tolist() == [sequences[2].row]
    assert third.plan.num_chunks == 0, "all that runs is on its way"


def test_rows_bound_how_many_run_and_come_back_when_one_ends():
    target = scheduler(num_rows=2)
    turns = Turns(target)
    for i, name in enumerate("abc"):
        target.add([one(name, [i] * 3, num_new=2)])
    assert turns.turn() == {"a/0": 3, "b/0": 3}
    assert turns.turn() == {"a/0": 1, "b/0": 1}
    assert turns.turn() == {}, "the rows are free once the results are known"
    assert turns.turn() == {"c/0": 3}
    turns.finish()


def test_the_youngest_gives_way_when_pages_run_out_and_comes_back_first():
    target = scheduler(page_size=1, num_pages=1 + 12)
    turns = Turns(target)
    old, young, late = (
        one(name, [i + 50] * size) for i, (name, size) in enumerate([("old", 5), ("young", 5), ("late", 1)])
    )
    for sequence in (old, young):
        target.add([sequence])
    turns.turn()
    target.add([late])
    while not target.num_preemptions:
        turns.turn()
    (preemption,) = target.preemptions
    assert preemption.sequence is young and target.waiting[0] is young
    assert preemption.num_computed == len(preemption.page_ids) == len(preemption.page_generations) == 6
    assert young.num_computed == 0 and young.num_outputs > 0, "it keeps its tokens, not its pages"
    turns.finish()
    assert young.num_outputs == old.num_outputs == late.num_outputs == 8


def test_whoever_comes_back_finds_its_pages_and_computes_the_rest():
    target = scheduler(page_size=4)
    turns = Turns(target)
    sequence = one("a", 9)
    target.add([sequence])
    for _ in range(4):
        turns.turn()
    turns.settle()
    assert sequence.num_tokens == 13
    target.preempt(sequence)
    schedule = target.schedule()
    assert schedule.plan.chunk_starts.tolist() == [12] and schedule.plan.token_ids.tolist() == [TOKEN]
    assert sequence.num_cached == 0, "that counts what others had computed"
    assert sequence.recomputed == ()


def test_whoever_comes_back_after_its_pages_went_is_computed_anew():
    target = scheduler()
    turns = Turns(target)
    sequence = one("a", 5)
    target.add([sequence])
    for _ in range(3):
        turns.turn()
    turns.settle()
    target.preempt(sequence)
    target.flush()
    schedule = target.schedule()
    assert turns.lengths(schedule) == {"a/0": 8}
    np.testing.assert_array_equal(schedule.plan.token_ids, [10, 11, 12, 13, 14, TOKEN, TOKEN, TOKEN])
    assert schedule.plan.chunk_samples.tolist() == [True]
    np.testing.assert_array_equal(schedule.plan.sampling.rows, [sequence.row])
    assert sequence.recomputed == ((0, 5),)


def test_a_prompt_that_is_computed_again_is_remembered_as_such():
    target = scheduler(chunk_tokens=32, page_size=4)
    turns = Turns(target)
    sequence = one("a", 70, num_new=4)
    target.add([sequence])
    turns.turn()
    for forgets in (True, False, True):
        turns.settle()
        target.preempt(sequence)
        if forgets:
            target.flush()
        turns.turn()
    assert sequence.recomputed == ((0, 32), (0, 32))
    turns.finish()


def test_the_token_of_a_preempted_sequence_is_dropped_and_sampled_again():
    target = scheduler()
    sequence = one("a", 5, num_new=3)
    target.add([sequence])
    in_flight = target.schedule()
    target.preempt(sequence)
    again = target.schedule()
    assert len(target.commit(in_flight, result_of(in_flight, 77)).rows) == 0
    assert sequence.num_outputs == 0
    target.commit(again, result_of(again, 78))
    assert sequence.tokens(5, 6).tolist() == [78]


def test_choices_share_the_whole_pages_of_their_prompt():
    target = scheduler(page_size=4)
    turns = Turns(target)
    group = choices("a", 10, n=3)
    target.add(group)
    assert turns.turn() == {"a/0": 10}
    assert turns.turn() == {"a/0": 1}, "the prompt is on its way"
    assert turns.turn() == {"a/0": 1, "a/1": 2, "a/2": 2}
    assert all(choice.pages[:2].tolist() == group[0].pages[:2].tolist() for choice in group)
    assert len({int(choice.pages[2]) for choice in group}) == 3, "the page that each writes to is its own"
    assert [choice.num_cached for choice in group] == [0, 8, 8]


def test_at_least_one_token_of_a_shared_prompt_is_left_to_compute():
    target = scheduler(page_size=4)
    turns = Turns(target, overlaps=False)
    group = choices("a", 8, n=2)
    target.add(group)
    turns.turn()
    assert turns.turn() == {"a/0": 1, "a/1": 4}
    assert group[1].num_cached == 4


def test_choices_do_not_wait_for_a_first_one_that_was_ended():
    target = scheduler()
    group = choices("a", 10, n=2)
    target.add(group)
    abort(target, group[0])
    assert Turns(target).turn() == {"a/1": 10}


def test_choices_find_what_an_aborted_first_one_had_computed():
    target = scheduler(chunk_tokens=8, page_size=4)
    turns = Turns(target)
    group = choices("a", 20, n=2)
    target.add(group)
    turns.turn()
    abort(target, group[0])
    turns.turn()
    assert group[1].num_cached == 8
    turns.finish()


def test_a_choice_that_was_ended_before_its_turn_never_runs():
    target = scheduler()
    turns = Turns(target, overlaps=False)
    group = choices("a", 10, n=3)
    target.add(group)
    abort(target, group[1])
    turns.turn()
    assert turns.turn() == {"a/0": 1, "a/2": 2}


@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_requests_share_prefixes_where_that_is_on_and_choices_always(caches_prefixes: bool):
    target = scheduler(caches_prefixes=caches_prefixes)
    turns = Turns(target)
    groups = [choices(name, 13, n=2) for name in "ab"]
    for group in groups:
        target.add(group)
        turns.finish()
    found = 12 if caches_prefixes else 0
    assert [[choice.num_cached for choice in group] for group in groups] == [[0, 12], [found, 12]]
    assert all_pages_are_free(target) == (not caches_prefixes), "what nobody may find is not kept"


def test_salts_keep_requests_apart():
    target = scheduler()
    turns = Turns(target)
    group = [one(f"r{i}", 13, salt=salt) for i, salt in enumerate(["", "x", "x", ""])]
    for sequence in group:
        target.add([sequence])
        turns.finish()
    assert [sequence.num_cached for sequence in group] == [0, 0, 12, 12]


def test_an_answer_is_found_by_the_next_turn_of_its_conversation():
    target = scheduler(page_size=4)
    turns = Turns(target)
    first = one("first", 10, num_new=7)
    target.add([first])
    turns.finish()
    conversation = first.tokens(0, first.num_tokens).tolist()
    second = one("second", [*conversation, 60, 61, 62])
    target.add([second])
    turns.turn()
    assert second.num_cached == 16, "17 tokens, the last of which was sampled and never computed"
    turns.finish()


def test_cached_pages_make_room_before_anyone_is_preempted():
    target = scheduler(page_size=4, num_pages=1 + 8)
    turns = Turns(target)
    for i in range(5):
        target.add([one(f"r{i}", [100 * i + j for j in range(20)], num_new=8)])
        turns.finish()
    assert target.num_preemptions == 0
    assert 0 < target.ranks[0].tree.num_cached_pages <= 8


def test_no_new_tokens_wanted_runs_the_prompt_and_samples_nothing():
    target = scheduler(chunk_tokens=16)
    turns = Turns(target)
    sequence = one("a", 20, num_new=0)
    target.add([sequence])
    assert turns.turn() == {"a/0": 16}
    assert turns.turn() == {"a/0": 4}
    turns.settle()
    assert sequence.finish == FinishReason("length")
    assert sequence.num_outputs == 0 and not target.has_work


def test_a_stop_token_ends_and_is_kept_and_the_one_after_it_is_dropped():
    target = scheduler(page_size=1)
    sequence = one("a", 3)
    target.add([sequence])
    first, extra = target.schedule(), target.schedule()
    assert extra.plan.chunk_starts.tolist() == [3]
    commit = target.commit(first, result_of(first, STOP_TOKEN_ID))
    assert commit.ended == [sequence] and len(sequence.pages) == 4, "one of them for the token too many"
    target.release(sequence)
    target.check_integrity()
    commit = target.commit(extra, result_of(extra))
    assert len(commit.rows) == 0 and commit.ended == []
    assert sequence.finish == FinishReason("stop", matched=STOP_TOKEN_ID)
    assert sequence.tokens(3, sequence.num_tokens).tolist() == [STOP_TOKEN_ID]
    assert not target.has_work and target.ranks[0].tree.num_cached_pages == 3
    target.flush()
    assert all_pages_are_free(target)


def test_the_next_owner_of_a_row_is_not_given_the_token_too_many():
    target = scheduler(num_rows=1)
    first, second = one("first", 3), one("second", [70, 71], num_new=2)
    for sequence in (first, second):
        target.add([sequence])
    begin, extra = target.schedule(), target.schedule()
    for sequence in target.commit(begin, result_of(begin, STOP_TOKEN_ID)).ended:
        target.release(sequence)
    takes_over = target.schedule()
    assert second.row == int(extra.plan.chunk_rows[0])
    assert len(target.commit(extra, result_of(extra, 88)).rows) == 0
    target.commit(takes_over, result_of(takes_over, 44))
    assert second.tokens(2, second.num_tokens).tolist() == [44]


def test_logits_that_are_not_finite_end_their_sequence_only_and_are_not_cached():
    target = scheduler()
    bad, good = one("bad", [*range(50, 59)]), one("good", 9)
    for sequence in (bad, good):
        target.add([sequence])
    schedule = target.schedule()
    assert target.commit(schedule, result_of(schedule, not_finite=(0,))).ended == [bad]
    target.release(bad)
    assert bad.finish is not None and bad.finish.kind == "error" and bad.num_outputs == 0
    assert good.finish is None and good.num_outputs == 1
    assert [target.ranks[0].num_cached(one("r", prompt)) for prompt in ([*range(50, 60)], 10)] == [0, 8]


def test_routing_is_wanted_where_anyone_in_the_step_asks():
    target = scheduler()
    target.add([one("a", 3)])
    assert not target.schedule().plan.wants_routing
    target.add([one("b", 3, num_new=1, routing=True)])
    assert target.schedule().plan.wants_routing
    assert not target.schedule().plan.wants_routing
    assert target.schedule(captures_all=True).plan.wants_routing


def test_an_empty_plan_computes_nothing():
    target = scheduler()
    first, second = target.empty_plan(), target.empty_plan()
    assert first.num_chunks == first.num_tokens == 0
    assert second.step_id == first.step_id + 1


def flushed_in_flight() -> tuple[Scheduler, Turns, Sequence]:
    """A sequence that has computed three pages, and a flush since."""
    target = scheduler(page_size=4)
    turns, sequence = Turns(target), one("a", 13, num_new=20)
    target.add([sequence])
    for _ in range(3):
        turns.turn()
    target.flush()
    return target, turns, sequence


def test_what_runs_goes_on_after_a_flush_but_is_not_found():
    target, turns, sequence = flushed_in_flight()
    late = one("late", 13, num_new=1)
    target.add([late])
    turns.turn()
    assert late.num_cached == 0
    turns.finish()
    assert sequence.num_outputs == 20
    again = one("again", sequence.tokens(0, 30))
    assert target.ranks[0].num_cached(again) == 12, "of the prompt that was computed since, and no more"


def test_a_prompt_in_flight_is_not_cached_by_the_result_after_a_flush():
    target = scheduler()
    target.add([one("a", 13)])
    schedule = target.schedule()
    target.flush()
    target.commit(schedule, result_of(schedule))
    assert target.ranks[0].num_cached(one("b", 13)) == 0


def rows_by_rank(target: Scheduler, schedule: Schedule) -> list[int]:
    per_rank = len(target.table.sequences) // len(target.ranks)
    return (schedule.plan.chunk_rows // per_rank).tolist()


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
    assert (second.data_rank, second.num_cached) == (first.data_rank, 12)
    assert (third.data_rank, third.num_cached) == (1 - first.data_rank, 0)
    turns.finish()


def test_ending_is_possible_in_every_state():
    target = scheduler(num_rows=1, chunk_tokens=8)
    waiting, prefilling = one("waiting", 9), one("prefilling", [*range(50, 70)])
    group = choices("group", [*range(70, 80)], n=2)
    for added in ([prefilling], [waiting], group):
        target.add(added)
    target.schedule()
    for sequence in (group[1], waiting, prefilling, group[0]):
        abort(target, sequence)
        assert sequence.finish == ABORT and sequence.row == NO_ROW and len(sequence.pages) == 0
    assert not target.has_work


def test_only_what_has_ended_is_released():
    target = scheduler()
    sequence = one("a", 3)
    target.add([sequence])
    with pytest.raises(AssertionError, match="only ended"):
        target.release(sequence)


def test_lost_rows_and_waiting_sequences_with_pages_are_noticed():
    target = scheduler()
    sequence = one("a", 3)
    target.add([sequence])
    target.schedule()
    target.waiting.append(sequence)
    with pytest.raises(AssertionError, match="a waiting sequence has a row"):
        target.check_integrity()
    target.waiting.clear()
    target.table.sequences[sequence.row] = None
    with pytest.raises(AssertionError, match="rows and running sequences differ"):
        target.check_integrity()
