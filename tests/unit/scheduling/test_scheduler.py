"""Who runs, who waits, who gives way. The laws that hold in every state are in `tests/properties`."""

from __future__ import annotations

import pytest

from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.sequence import NO_ROW
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED
from tests.support.engine.schedulers import (
    ABORT,
    STOP_TOKEN_ID,
    Turns,
    abort,
    all_pages_are_free,
    choices,
    one,
    result_of,
    scheduler,
)


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
    assert [target.schedule().plan.chunks.samples.tolist() for _ in range(3)] == [[False], [False], [True]]


def test_a_sequence_goes_on_from_the_token_that_is_on_its_way():
    target = scheduler()
    sequence = one("a", 5, num_new=4)
    target.add([sequence])
    ahead = [target.schedule() for _ in range(5)]
    assert [schedule.plan.chunks.starts.tolist() for schedule in ahead] == [[0], [5], [6], [7], []]
    assert [schedule.plan.chunks.token_ids.tolist() for schedule in ahead[1:4]] == [[LAST_SAMPLED]] * 3
    for i, schedule in enumerate(ahead[:4]):
        _, ended = target.commit(schedule, result_of(schedule, 40 + i))
    assert ended == [sequence] and sequence.token_ids[5:9].tolist() == [40, 41, 42, 43]


def test_nothing_is_computed_beyond_the_last_token_that_is_wanted():
    target = scheduler()
    sequences = [one(f"r{num_new}", [num_new], num_new=num_new) for num_new in (0, 1, 2)]
    for sequence in sequences:
        target.add([sequence])
    first, second, third = (target.schedule() for _ in range(3))
    assert first.plan.num_chunks == 3 and first.plan.chunks.samples.tolist() == [False, True, True]
    assert second.plan.chunks.rows.tolist() == [sequences[2].row]
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
    preemptions = []
    target.on_preemption = preemptions.append
    while not target.num_preemptions:
        turns.turn()
    (preemption,) = preemptions
    assert preemption.sequence is young and target.waiting[0] is young
    assert preemption.num_computed == len(preemption.pages) == len(preemption.page_generations) == 6
    assert young.num_computed == 0 and young.num_outputs > 0, "it keeps its tokens, not its pages"
    turns.finish()
    assert young.num_outputs == old.num_outputs == late.num_outputs == 8


def test_the_token_of_a_preempted_sequence_is_dropped_and_sampled_again():
    target = scheduler()
    sequence = one("a", 5, num_new=3)
    target.add([sequence])
    in_flight = target.schedule()
    target.preempt(sequence)
    again = target.schedule()
    assert len(target.commit(in_flight, result_of(in_flight, 77))[0]) == 0
    assert sequence.num_outputs == 0
    target.commit(again, result_of(again, 78))
    assert sequence.token_ids[5:6].tolist() == [78]


def test_choices_do_not_wait_for_a_first_one_that_was_ended():
    target = scheduler()
    group = choices("a", 10, n=2)
    target.add(group)
    abort(target, group[0])
    assert Turns(target).turn() == {"a/1": 10}


def test_a_choice_that_was_ended_before_its_turn_never_runs():
    target = scheduler()
    turns = Turns(target, overlaps=False)
    group = choices("a", 10, n=3)
    target.add(group)
    abort(target, group[1])
    assert turns.turn() == {"a/0": 10, "a/2": 0}
    assert turns.turn() == {"a/0": 1, "a/2": 1}


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


def test_a_prompt_is_not_done_by_the_result_of_its_run_before_a_preemption():
    target = scheduler(chunk_tokens=8)
    group = choices("a", 12, num_new=0, n=2)
    target.add(group)
    target.schedule()
    ends_prompt = target.schedule()
    for choice in reversed(group):
        target.preempt(choice)
    target.flush()
    target.schedule()
    assert target.commit(ends_prompt, result_of(ends_prompt))[1] == []
    assert [choice.num_computed for choice in group] == [8, 8]


def test_a_stop_token_ends_and_is_kept_and_the_one_after_it_is_dropped():
    target = scheduler(page_size=1)
    sequence = one("a", 3)
    target.add([sequence])
    first, extra = target.schedule(), target.schedule()
    assert extra.plan.chunks.starts.tolist() == [3]
    _, ended = target.commit(first, result_of(first, STOP_TOKEN_ID))
    assert ended == [sequence] and len(sequence.pages) == 4, "one of them for the token too many"
    target.release(sequence)
    target.check_integrity()
    rows, ended = target.commit(extra, result_of(extra))
    assert len(rows) == 0 and ended == []
    assert sequence.finish == FinishReason("stop", matched=STOP_TOKEN_ID)
    assert sequence.token_ids[3 : sequence.num_tokens].tolist() == [STOP_TOKEN_ID]
    assert not target.has_work and target.ranks[0].tree.num_cached_pages == 3
    target.flush()
    assert all_pages_are_free(target)


def test_the_next_owner_of_a_row_is_not_given_the_token_too_many():
    target = scheduler(num_rows=1)
    first, second = one("first", 3), one("second", [70, 71], num_new=2)
    for sequence in (first, second):
        target.add([sequence])
    begin, extra = target.schedule(), target.schedule()
    for sequence in target.commit(begin, result_of(begin, STOP_TOKEN_ID))[1]:
        target.release(sequence)
    takes_over = target.schedule()
    assert second.row == int(extra.plan.chunks.rows[0])
    assert len(target.commit(extra, result_of(extra, 88))[0]) == 0
    target.commit(takes_over, result_of(takes_over, 44))
    assert second.token_ids[2 : second.num_tokens].tolist() == [44]


def test_routing_is_wanted_where_anyone_in_the_step_asks():
    target = scheduler()
    target.add([one("a", 3)])
    assert not target.schedule().plan.wants_routing
    target.add([one("b", 3, num_new=1, routing=True)])
    assert target.schedule().plan.wants_routing
    assert not target.schedule().plan.wants_routing
    target.captures_all = True
    assert target.schedule().plan.wants_routing


def test_an_empty_plan_computes_nothing():
    target = scheduler()
    first, second = target.empty_plan(), target.empty_plan()
    assert first.num_chunks == first.num_tokens == 0
    assert second.step_id == first.step_id + 1


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
    target.waiting.add(sequence)
    with pytest.raises(AssertionError, match="a waiting sequence has a row"):
        target.check_integrity()
    target.waiting.clear()
    target.table.sequences[sequence.row] = None
    with pytest.raises(AssertionError, match="rows and running sequences differ"):
        target.check_integrity()


def test_other_choices_do_not_overtake_who_was_preempted():
    target = scheduler(num_rows=2)
    turns = Turns(target)
    old, group = one("old", [*range(200, 209)], num_new=30), choices("group", 9, n=3, num_new=4)
    turns.begin(old)
    target.add(group)
    turns.turn()
    target.preempt(old)
    target.add([one("later", [300, 301])])
    assert [s.request.request_id for s in target.waiting] == ["old", "later"]
    turns.settle()
    names = [f"{s.request.request_id}/{s.choice_index}" for s in target.waiting]
    assert names == ["old/0", "group/1", "group/2", "later/0"]
    turns.finish()
    assert all_pages_are_free(target) or target.ranks[0].num_available == target.ranks[0].allocator.num_usable
