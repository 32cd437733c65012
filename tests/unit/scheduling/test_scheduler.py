"""Who runs, who waits, who gives way. The laws that hold in every state are in `tests/properties`."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests import FinishReason, GenerationRequest, SamplingParams
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.scheduler import Schedule, Scheduler, StepLimits
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult

TOKEN = 9


def choices(request_id: str, prompt_len: int, *, num_new: int = 8, n: int = 1, routing: bool = False) -> list[Sequence]:
    prompt = np.arange(10, 10 + prompt_len, dtype=np.int32)
    request = GenerationRequest(request_id, prompt, SamplingParams(max_new_tokens=num_new, n=n), routing)
    return [Sequence(request, i, seed=5, stop_token_ids=frozenset([2])) for i in range(n)]


def scheduler(*, num_rows: int = 4, step: int = 64, chunk: int = 64, page_size: int = 4, pages: int = 64) -> Scheduler:
    return Scheduler(StepLimits(num_rows, step, chunk, page_size), PageAllocator(pages))


def turn(target: Scheduler, token_id: int = TOKEN) -> Schedule:
    """Schedule, sample `token_id` wherever a sample is due, commit, release."""
    schedule = target.schedule()
    count = schedule.plan.num_chunks
    ids = np.where(schedule.plan.chunk_samples, token_id, -1)
    result = StepResult(schedule.plan.step_id, ids, np.zeros(count), np.ones(count, bool))
    for sequence in target.commit(schedule, result):
        target.release(sequence)
    target.check_integrity()
    return schedule


def lengths(schedule: Schedule) -> dict[str, int]:
    owners = [f"{s.request.request_id}/{s.choice_index}" for s in schedule.sequences]
    return dict(zip(owners, schedule.plan.chunk_lengths.tolist(), strict=True))


def test_decoding_and_prompts_share_a_step():
    target = scheduler(chunk=16)
    target.add(choices("a", 5))
    assert lengths(turn(target)) == {"a/0": 5}
    target.add(choices("b", 40))
    assert lengths(turn(target)) == {"a/0": 1, "b/0": 16}
    assert lengths(turn(target)) == {"a/0": 1, "b/0": 16}
    assert lengths(turn(target)) == {"a/0": 1, "b/0": 8}
    assert lengths(turn(target)) == {"a/0": 1, "b/0": 1}


def test_a_step_is_filled_in_the_order_of_arrival():
    target = scheduler(step=32)
    for name in "abc":
        target.add(choices(name, 20))
    assert lengths(turn(target)) == {"a/0": 20}
    assert lengths(turn(target)) == {"a/0": 1, "b/0": 20}
    assert lengths(turn(target)) == {"a/0": 1, "b/0": 1, "c/0": 20}


def test_only_the_chunk_that_ends_a_prompt_samples():
    target = scheduler(chunk=16)
    target.add(choices("a", 33))
    assert [turn(target).plan.chunk_samples.tolist() for _ in range(3)] == [[False], [False], [True]]


def test_rows_bound_how_many_run_and_come_back_when_one_ends():
    target = scheduler(num_rows=2)
    for name in "abc":
        target.add(choices(name, 3, num_new=2))
    assert set(lengths(turn(target))) == {"a/0", "b/0"}
    assert set(lengths(turn(target))) == {"a/0", "b/0"}
    schedule = turn(target)
    assert set(lengths(schedule)) == {"c/0"}
    assert schedule.plan.chunk_rows.tolist() in ([0], [1])


def test_the_youngest_gives_way_when_pages_run_out_and_comes_back_first():
    target = scheduler(page_size=1, pages=1 + 12)
    old, young, late = (choices(name, size)[0] for name, size in [("old", 5), ("young", 5), ("late", 1)])
    for sequence in (old, young):
        target.add([sequence])
    turn(target)
    target.add([late])
    while not target.num_preemptions:
        schedule = turn(target)
    (preemption,) = schedule.preemptions
    assert preemption.sequence is young
    assert preemption.num_computed == len(preemption.pages) == 6
    assert target.waiting[0] is young
    assert young.num_computed == 0 and young.num_outputs > 0, "it keeps its tokens, not its pages"
    while target.has_work:
        turn(target)
    assert young.num_outputs == old.num_outputs == late.num_outputs == 8


def test_a_sequence_that_comes_back_is_computed_anew_with_its_own_tokens():
    target = scheduler()
    (sequence,) = choices("a", 5)
    target.add([sequence])
    for _ in range(3):
        turn(target)
    target.preempt(sequence)
    schedule = turn(target)
    assert [p.sequence for p in schedule.preemptions] == [sequence]
    assert lengths(schedule) == {"a/0": 8}
    np.testing.assert_array_equal(schedule.plan.token_ids, [10, 11, 12, 13, 14, TOKEN, TOKEN, TOKEN])
    assert schedule.plan.chunk_samples.tolist() == [True]
    np.testing.assert_array_equal(schedule.plan.sampling.rows, [sequence.row])


def test_choices_share_the_whole_pages_of_their_prompt():
    target = scheduler(page_size=4)
    group = choices("a", 10, n=3)
    target.add(group)
    assert lengths(turn(target)) == {"a/0": 10}
    assert lengths(turn(target)) == {"a/0": 1, "a/1": 2, "a/2": 2}
    shared = group[0].pages[:2]
    assert all(choice.pages[:2] == shared for choice in group)
    assert len({choice.pages[2] for choice in group}) == 3, "the page that each writes to is its own"
    assert [choice.num_cached for choice in group] == [0, 8, 8]


def test_at_least_one_token_of_a_shared_prompt_is_left_to_compute():
    target = scheduler(page_size=4)
    group = choices("a", 8, n=2)
    target.add(group)
    turn(target)
    assert lengths(turn(target)) == {"a/0": 1, "a/1": 4}
    assert group[1].num_cached == 4


def test_choices_do_not_wait_for_a_first_one_that_was_ended():
    target = scheduler()
    group = choices("a", 10, n=2)
    target.add(group)
    target.end(group[0], FinishReason("abort"))
    target.release(group[0])
    assert lengths(turn(target)) == {"a/1": 10}


def test_a_choice_that_was_ended_before_its_turn_never_runs():
    target = scheduler()
    group = choices("a", 10, n=3)
    target.add(group)
    target.end(group[1], FinishReason("abort"))
    target.release(group[1])
    turn(target)
    assert lengths(turn(target)) == {"a/0": 1, "a/2": 2}


def test_waiting_choices_give_up_shared_pages_before_anyone_is_preempted():
    target = scheduler(chunk=8, page_size=4, pages=1 + 3)
    group, (other,) = choices("a", 9, num_new=1, n=3), choices("b", 4, num_new=4)
    target.add(group)
    target.add([other])
    assert lengths(turn(target)) == {"a/0": 8, "b/0": 4}
    target.end(group[0], FinishReason("abort"))
    target.release(group[0])
    assert all(choice.num_cached == 8 for choice in group[1:])
    assert lengths(turn(target)) == {"b/0": 1}
    assert target.num_preemptions == 0
    assert all(choice.num_cached == choice.num_computed == 0 and not choice.pages for choice in group[1:])
    while target.has_work:
        turn(target)
    assert [choice.num_outputs for choice in group] == [0, 1, 1]


def test_no_new_tokens_wanted_runs_the_prompt_and_samples_nothing():
    target = scheduler(chunk=16)
    (sequence,) = choices("a", 20, num_new=0)
    target.add([sequence])
    assert not turn(target).plan.chunk_samples.any()
    assert not turn(target).plan.chunk_samples.any()
    assert sequence.finish == FinishReason("length")
    assert sequence.num_outputs == 0 and not target.has_work


def test_a_stop_token_ends_and_is_kept():
    target = scheduler()
    (sequence,) = choices("a", 3)
    target.add([sequence])
    turn(target, token_id=2)
    assert sequence.finish == FinishReason("stop", matched=2)
    np.testing.assert_array_equal(sequence.tokens(3, sequence.num_tokens), [2])


def test_logits_that_are_not_finite_end_their_sequence_only():
    target = scheduler()
    (bad,), (good,) = choices("bad", 3), choices("good", 3)
    for sequence in (bad, good):
        target.add([sequence])
    schedule = target.schedule()
    result = StepResult(schedule.plan.step_id, np.array([4, 4]), np.zeros(2), np.array([False, True]))
    assert target.commit(schedule, result) == [bad]
    assert bad.finish is not None and bad.finish.kind == "error" and bad.num_outputs == 0
    assert good.finish is None and good.num_outputs == 1


def test_routing_is_wanted_where_anyone_in_the_step_asks():
    target = scheduler()
    target.add(choices("a", 3))
    assert not turn(target).plan.wants_routing
    target.add(choices("b", 3, num_new=1, routing=True))
    assert turn(target).plan.wants_routing
    assert not turn(target).plan.wants_routing


def test_an_empty_plan_only_harvests():
    target = scheduler()
    first, second = target.harvest_plan(), target.harvest_plan()
    assert first.num_chunks == first.num_tokens == 0
    assert second.step_id == first.step_id + 1
