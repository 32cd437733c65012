"""What is scored of a prompt, when, and in which kind of chunk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.requests.columns import as_array
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence, prompt_columns
from rayserve_moe.scheduling.step_plan import StepResult
from rayserve_moe.scheduling.token_probe import IS_FINITE, probe_for
from tests.support.engine.schedulers import choices, result_of, scheduler

PROMPT_LEN = 20


def scored(first: int, *, n: int = 1, num_top: int = 0, name: str = "s", **changes: object) -> list[Sequence]:
    group = choices(name, PROMPT_LEN, num_new=3, n=n)
    request = replace(group[0].request, score_prompt_from=first, num_top_logprobs=num_top, **changes)
    return [Sequence(request, i, seed=0, stop_token_ids=frozenset()) for i in range(n)]


def result_with_scores(schedule: Schedule, *, value: float | None = None) -> StepResult:
    """A result whose scores are minus the token that is scored, or `value`."""
    targets = targets_of(schedule)
    logprobs = -targets.astype(np.float32) if value is None else np.full(len(targets), value, np.float32)
    probed = {
        "logprobs": logprobs,
        "ranks": targets,
        "top_ids": np.tile(targets[:, None], (1, 20)),
        "top_logprobs": np.tile(logprobs[:, None], (1, 20)),
        IS_FINITE: np.isfinite(logprobs),
    }
    result = result_of(schedule)
    count = len(result.token_ids)
    columns = {"top_ids": np.zeros((count, 20), np.int32), "top_logprobs": np.zeros((count, 20), np.float32)}
    return replace(result, probed=probed, columns=columns)


def targets_of(schedule: Schedule) -> np.ndarray:
    probe = schedule.plan.probe
    return np.zeros(0, np.int32) if probe is None else probe.targets


def scores_of(sequence: Sequence) -> list[float]:
    prompt = prompt_columns(sequence)
    assert prompt is not None
    return prompt.columns["logprobs"].tolist()


def finish(target: Scheduler, *, limit: int = 100, **kwargs: float) -> None:
    for _ in range(limit):
        if not target.has_work:
            return
        schedule = target.schedule()
        for sequence in target.commit(schedule, result_with_scores(schedule, **kwargs))[1]:
            target.release(sequence)
        target.check_integrity()
    raise AssertionError("the requests do not come to an end")


def expected(first: int) -> list[float]:
    return [-float(token) for token in range(10 + first + 1, 10 + PROMPT_LEN)]


@pytest.mark.parametrize("first", [0, 7, PROMPT_LEN - 1])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_every_token_above_the_first_is_scored_once(first: int, chunk_tokens: int):
    target = scheduler(chunk_tokens=chunk_tokens)
    group = scored(first, n=3, num_top=2)
    target.add(group)
    finish(target)
    for sequence in group:
        prompt = prompt_columns(sequence)
        assert prompt is not None and prompt.starts["logprobs"] == first and scores_of(sequence) == expected(first)
        assert as_array(prompt.columns["top_ids"]).shape == (PROMPT_LEN - 1 - first, 2)
        assert sequence.finish is not None and sequence.finish.kind == "length"


def test_no_choice_is_probed_once_the_prompt_is_scored():
    target = scheduler()
    group = scored(0, n=3)
    target.add(group)
    schedule = target.schedule()
    assert all(sequence.row != NO_ROW for sequence in group), "the others fork off in the step that scores"
    target.commit(schedule, result_with_scores(schedule))
    assert target.table.wants.num_probed == 0
    finish(target)
    assert target.table.wants.num_probed == 0


def test_a_preempted_choice_is_not_probed_once_a_step_from_before_has_scored():
    target = scheduler()
    (sequence,) = scored(0)
    target.add([sequence])
    schedule = target.schedule()
    target.preempt(sequence)
    again = target.schedule()
    target.commit(schedule, result_with_scores(schedule))
    assert sequence.row != NO_ROW and target.table.wants.num_probed == 0
    target.commit(again, result_with_scores(again))
    finish(target)
    assert scores_of(sequence) == expected(0)


def test_chunks_that_score_take_blocks_however_short():
    target = scheduler(chunk_tokens=1)
    target.add(scored(5))
    for position in range(PROMPT_LEN):
        schedule = target.schedule()
        scores = 5 <= position < PROMPT_LEN - 1
        assert schedule.plan.has_blocks == scores and len(schedule.plan.block_work.chunks) == scores
        assert targets_of(schedule).tolist() == ([10 + position + 1] if scores else [])
        target.commit(schedule, result_with_scores(schedule))


def test_a_step_without_room_for_a_block_does_not_score():
    target = scheduler(step_tokens=32, chunk_tokens=1)
    target.add(scored(0, name="a"))
    target.add(scored(0, name="b"))
    assert len(target.schedule().plan.chunks.rows) == 1, "a second block does not fit"


def test_a_cached_prefix_is_taken_up_to_the_first_that_is_scored():
    target = scheduler()
    target.add(choices("plain", PROMPT_LEN))
    finish(target)
    for first, num_cached in ((0, 0), (7, 4), (8, 8), (PROMPT_LEN - 1, 16)):
        (sequence,) = scored(first)
        target.add([sequence])
        finish(target)
        probe = sequence.evidence.probe
        assert sequence.cache.num_cached == num_cached and probe is not None and probe.is_complete


def test_scores_stay_over_a_preemption_and_are_not_computed_twice():
    target = scheduler(chunk_tokens=8)
    (sequence,) = scored(2)
    target.add([sequence])
    schedule = target.schedule()
    target.commit(schedule, result_with_scores(schedule))
    in_flight = target.schedule()
    target.preempt(sequence)
    target.flush()
    target.commit(in_flight, result_with_scores(in_flight))
    assert sequence.evidence.probe is not None and sequence.evidence.probe.frontier == 16
    again = target.schedule()
    assert again.plan.chunks.starts.tolist() == [0] and len(targets_of(again)) == 0
    target.commit(again, result_with_scores(again))
    finish(target)
    assert scores_of(sequence) == expected(2)


def test_what_ends_early_has_the_scores_that_were_found():
    target = scheduler(chunk_tokens=8)
    (sequence,) = scored(2)
    target.add([sequence])
    schedule = target.schedule()
    target.commit(schedule, result_with_scores(schedule))
    assert scores_of(sequence) == expected(2)[:6]


def test_scores_that_are_not_finite_end_the_request():
    target = scheduler(chunk_tokens=8)
    (sequence,) = scored(2)
    target.add([sequence])
    finish(target, value=float("nan"))
    assert sequence.finish is not None and sequence.finish.kind == "error"
    assert target.ranks[0].tree.num_cached_pages == 0, "nobody finds what may be broken"


def test_nothing_to_score_is_complete():
    probe = probe_for(scored(PROMPT_LEN - 1)[0].request, "0")
    assert probe is not None and probe.is_complete and len(probe.result().columns["logprobs"]) == 0


def test_forced_rows_go_with_their_tokens_and_their_chunks_take_blocks():
    rows = np.arange(12).reshape(12, 1, 1)
    target = scheduler(chunk_tokens=5)
    group = choices("f", PROMPT_LEN, num_new=2)
    request = replace(group[0].request, forced_routing=RoutedExperts(rows, start=8))
    sequence = Sequence(request, 0, seed=0, stop_token_ids=frozenset())
    target.add([sequence])
    told = {}
    for _ in range(4):
        schedule = target.schedule()
        work, start = schedule.plan.block_work, int(schedule.plan.chunks.starts[0])
        if work.forced_rows is not None:
            assert work.chunks.tolist() == [0]
            told |= dict(zip((start + work.forced_tokens).tolist(), work.forced_rows[:, 0, 0].tolist(), strict=True))
        target.commit(schedule, result_of(schedule))
    assert told == {8 + i: i for i in range(12)}
    assert target.ranks[0].num_cached(choices("other", PROMPT_LEN)[0]) == 0
    finish(target)
    assert target.ranks[0].tree.num_cached_pages == 0, "what nobody else may find is not kept"
