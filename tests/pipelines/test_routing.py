"""Routing that is returned is right, complete, and says where it came from; otherwise it says what is missing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rayserve_moe import Engine, extract_routed_experts_from_meta_info
from rayserve_moe.answers.native import routing_fields
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest
from tests.support.engine.outputs import Outcomes, assert_same
from tests.support.engine.run_requests import Way, kept_tokens, preempt_every, run_alone, run_together
from tests.support.engine.workload import draw_prompt, engine_arguments, mixed_workload, request_for

PROMPT = draw_prompt(np.random.default_rng(1), 40)


def intervened(engine: Engine, request: GenerationRequest, intervene: Callable, **way: object) -> Outcomes:
    return run_together(engine.runner, engine.card, [request], way=Way(intervene=intervene, **way))


def test_there_is_one_row_per_token_but_the_last(alone: Outcomes):
    for request in mixed_workload():
        for choice in range(request.sampling.n):
            outcome = alone[request.request_id, choice]
            num_tokens = len(request.prompt_ids) + len(outcome.ids)
            assert len(outcome.rows) == (num_tokens - 1 if outcome.ids else num_tokens)
            assert outcome.routing is not None
            assert outcome.routing.missing == () and outcome.routing.start == 0
            assert outcome.routing.weight_version == ((0, len(outcome.rows), "0"),)


def test_a_row_names_experts_once_each(alone: Outcomes, engine: Engine):
    for outcome in alone.values():
        assert outcome.rows.shape[1:] == engine.card.routing.row_shape
        assert outcome.rows.max() < engine.card.routing.num_experts
        assert (np.diff(np.sort(outcome.rows, axis=-1), axis=-1) > 0).all(), "an expert is picked twice"


@pytest.mark.parametrize("n", [1, 3])
def test_no_new_tokens_give_all_prompt_rows_and_nothing_else(engine: Engine, n: int):
    generated = run_alone(engine.runner, engine.card, [request_for(PROMPT, "r", max_new_tokens=5)])["r", 0]
    wanted = request_for(PROMPT, "r", max_new_tokens=0, n=n)
    answers = engine.generate(**engine_arguments(wanted))
    for answer in answers if n > 1 else [answers]:
        assert answer["output_ids"] == [] and answer["text"] == ""
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        layout = engine.card.routing
        rows = extract_routed_experts_from_meta_info(answer).reshape(len(PROMPT), layout.num_hidden_layers, -1)
        with_experts = answer["meta_info"]["routed_experts_info"]["layer_ids"]
        assert tuple(with_experts) == layout.layer_ids
        assert not np.delete(rows, with_experts, axis=1).any(), "a dense layer has no ids"
        np.testing.assert_array_equal(rows[:, with_experts], generated.rows[: len(PROMPT)])


def test_the_first_layer_of_the_core_model_is_dense(engine: Engine):
    assert (engine.card.routing.num_hidden_layers, engine.card.routing.layer_ids) == (3, (1, 2))


def test_choices_agree_on_the_prompt_and_say_what_they_shared(engine: Engine):
    wanted = request_for(PROMPT, n=4, temperature=1.0, seed=8, max_new_tokens=12)
    choices = run_together(engine.runner, engine.card, [wanted])
    first = choices["r", 0].rows[: len(PROMPT)]
    for index in range(4):
        outcome = choices["r", index]
        np.testing.assert_array_equal(outcome.rows[: len(PROMPT)], first)
        num_rows = len(PROMPT) + 11
        shared = ((0, len(PROMPT), "cached"), (len(PROMPT), num_rows, "computed"))
        assert outcome.routing is not None
        assert outcome.routing.source == (shared if index else ((0, num_rows, "computed"),))


@pytest.mark.parametrize("forgets", [True, False])
def test_rows_of_sampled_tokens_survive_preemption(engine: Engine, forgets: bool):
    wanted = request_for(PROMPT, temperature=1.0, seed=4, max_new_tokens=30)
    untouched = run_alone(engine.runner, engine.card, [wanted])["r", 0]
    outcome = intervened(engine, wanted, preempt_every(7, forgets=forgets))["r", 0]
    assert_same(outcome, untouched)
    assert outcome.routing is not None
    num_found = 0 if forgets else 40 // kept_tokens(engine.runner) * kept_tokens(engine.runner)
    found = ((0, num_found, "computed"),) if num_found else ()
    wanted_source = (*found, (num_found, 40, "recomputed"), (40, 69, "computed"))
    assert outcome.routing.source == wanted_source, "a page that is not full is not kept"


@pytest.mark.parametrize("preempted_again_at", [None, 15])
def test_kept_rows_outrank_what_is_computed_again(engine: Engine, preempted_again_at: int | None):
    """The rows that belong to the log-probs that were returned are those of the first run, not of the second."""
    wanted = request_for(PROMPT, max_new_tokens=20)
    marked = np.uint8(7)

    def mark_kept_rows(cycle: StepCycle, step: int) -> None:
        if step in (10, preempted_again_at):
            cycle.scheduler.preempt(cycle.scheduler.running[0])
            cycle.scheduler.flush()
        if step == 11:
            (sequence,) = cycle.scheduler.running
            assert sequence.routing.kept is not None and sequence.routing.kept.end == 48
            sequence.routing.kept.rows[40:] = marked

    outcome = intervened(engine, wanted, mark_kept_rows)["r", 0]
    untouched = run_alone(engine.runner, engine.card, [wanted])["r", 0]
    assert (outcome.rows[40:48] == marked).all()
    np.testing.assert_array_equal(np.delete(outcome.rows, np.s_[40:48], 0), np.delete(untouched.rows, np.s_[40:48], 0))


@pytest.mark.parametrize("preempted_at", [2, 4, 9])
def test_an_abort_reports_rows_right_or_missing(engine: Engine, preempted_at: int):
    wanted = request_for(PROMPT, max_new_tokens=20)
    untouched = run_alone(engine.runner, engine.card, [wanted])["r", 0]

    def preempt_then_abort(cycle: StepCycle, step: int):
        if step == preempted_at:
            (sequence,) = cycle.scheduler.running
            cycle.scheduler.preempt(sequence)
            return [cycle.end(sequence, FinishReason("abort"))]
        return None

    outcome = intervened(engine, wanted, preempt_then_abort, chunk_tokens=16)["r", 0]
    assert outcome.finish == FinishReason("abort")
    _check_right_or_missing(outcome, untouched)
    num_in = 16 * (preempted_at - 1)
    assert outcome.routing is not None
    assert outcome.routing.missing == (((num_in, 39),) if num_in < 39 else ()), "its pages are gone, its rows are not"


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("aborted_at", [1, 2, 3, 8])
def test_an_abort_between_steps_reports_all_it_computed(engine: Engine, aborted_at: int, overlaps: bool):
    wanted = request_for(PROMPT, max_new_tokens=20)
    untouched = run_alone(engine.runner, engine.card, [wanted])["r", 0]

    def abort(cycle: StepCycle, step: int):
        return [cycle.end(cycle.scheduler.running[0], FinishReason("abort"))] if step == aborted_at else None

    outcome = intervened(engine, wanted, abort, chunk_tokens=16, overlaps=overlaps)["r", 0]
    _check_right_or_missing(outcome, untouched)
    num_results = aborted_at - overlaps
    computed = min(16 * num_results, 40) + max(0, num_results - 3)
    assert outcome.routing is not None
    assert len(outcome.rows) == max(39, computed, min(16 * aborted_at, 40))
    assert outcome.routing.missing == (((computed, len(outcome.rows)),) if computed < len(outcome.rows) else ())


def _check_right_or_missing(outcome, untouched) -> None:
    is_missing = np.zeros(len(outcome.rows), bool)
    for first, last in outcome.routing.missing:
        is_missing[first:last] = True
    np.testing.assert_array_equal(outcome.rows[~is_missing], untouched.rows[: len(outcome.rows)][~is_missing])


def test_a_page_of_another_generation_is_missing_not_wrong(engine: Engine):
    wanted = request_for(PROMPT, max_new_tokens=20)
    untouched = run_alone(engine.runner, engine.card, [wanted])["r", 0]

    def spoil_stamps(cycle: StepCycle, step: int) -> None:
        if step == 12:
            cycle.scheduler.running[0].page_generations[1] += 1000

    outcome = intervened(engine, wanted, spoil_stamps)["r", 0]
    assert outcome.routing is not None
    assert outcome.routing.missing == ((16, 32),)
    _check_right_or_missing(outcome, untouched)
    assert outcome.ids == untouched.ids
    fields = routing_fields(outcome.routing, engine.card.routing)
    assert fields["routed_experts"] is None, "zeros never stand in for data"
    assert fields["routed_experts_info"]["missing"] == [[16, 32]]


def test_an_aborted_stream_returns_the_rows_of_its_tokens(engine: Engine):
    stream = engine.generate_stream(
        input_ids=PROMPT.tolist(), max_new_tokens=300, temperature=0, ignore_eos=True, return_routed_experts=True
    )
    first = next(stream)
    engine.loop.abort_stem(first["meta_info"]["id"])
    *_, last = stream
    meta = last["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["routed_experts_info"]["shape"] == [len(PROMPT) + meta["completion_tokens"] - 1, 2, 2]
    assert meta["routed_experts_info"]["missing"] == []
    assert meta["routed_experts"] is not None


def test_expert_counts_are_the_rows_counted(engine: Engine):
    requests = [request_for(r.prompt_ids, r.request_id, max_new_tokens=10) for r in mixed_workload()]
    before = engine.runner.expert_counts().copy()
    outcomes = run_together(engine.runner, engine.card, requests)
    counted = engine.runner.expert_counts() - before
    rows = np.concatenate([outcome.rows for outcome in outcomes.values()])
    num_experts = engine.card.routing.num_experts
    expected = [np.bincount(rows[:, layer].reshape(-1), minlength=num_experts) for layer in range(rows.shape[1])]
    np.testing.assert_array_equal(counted, expected)
    assert (counted > 0).all(), "no expert of this model is idle over so many tokens"
