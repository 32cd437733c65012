"""Forced routing is taken as told: what was captured reproduces a run, anything else changes it; nobody shares it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.requests.records import GenerationRequest
from tests.pipelines.conftest import ON_TWO_RANKS
from tests.support.engine.outputs import LOGPROB_TOLERANCE, Outcomes, assert_all_same, assert_same, assert_same_prompt
from tests.support.engine.run_requests import Way, cycle_for, preempt_every, run_alone, run_on, run_together
from tests.support.engine.sampling_reference import forcing, other_rows
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for

WAYS = {
    "together": Way(),
    "chunks that cut pages": Way(chunk_tokens=7, step_tokens=48),
    "single tokens": Way(chunk_tokens=1),
    "preemption every 2 steps": Way(chunk_tokens=16, intervene=preempt_every(2)),
    "preemption every 4 steps, all forgotten": Way(chunk_tokens=64, intervene=preempt_every(4, forgets=True)),
    "one step after the other": Way(overlaps=False, chunk_tokens=32),
    "no cached prefixes": Way(caches_prefixes=False),
}


def free_requests() -> list[GenerationRequest]:
    """Prompts to score whole, and to generate on from."""
    generator = np.random.default_rng(40)
    requests = [
        request_for(draw_prompt(generator, length), f"f{i}", max_new_tokens=6, n=1 + i % 2)
        for i, length in enumerate((70, 33, 5))
    ]
    return [replace(request, score_prompt_from=0) for request in requests]


@pytest.fixture(scope="module")
def free(engine: Engine) -> Outcomes:
    return run_alone(engine.runner, engine.card, free_requests())


def forced_requests(free: Outcomes, num_experts: int) -> list[GenerationRequest]:
    """The same with other experts: from the start or later, with and without a row for the last prompt token."""
    requests = []
    for i, request in enumerate(free_requests()):
        start, stop = i, len(request.prompt_ids) - i % 2
        rows = other_rows(free[request.request_id, 0].rows[start:stop], num_experts=num_experts)
        requests.append(forcing(request, rows, start=start))
    return requests


@pytest.fixture(scope="module")
def forced(engine: Engine, free: Outcomes) -> Outcomes:
    return run_alone(engine.runner, engine.card, forced_requests(free, engine.card.routing.num_experts))


def test_captured_routing_reproduces_the_run(engine: Engine, free: Outcomes):
    requests = []
    for request in free_requests():
        rows = free[request.request_id, 0].rows[: len(request.prompt_ids)]
        requests.append(forcing(request, rows.astype(np.int32)))
    assert_all_same(run_together(engine.runner, engine.card, requests), free)


def test_a_whole_rollout_is_reproduced(engine: Engine, free: Outcomes):
    (request, *_), outcome = free_requests(), free["f0", 0]
    tokens = [*request.prompt_ids.tolist(), *outcome.ids]
    again = replace(request_for(tokens, max_new_tokens=0), score_prompt_from=len(request.prompt_ids) - 1)
    found = run_alone(engine.runner, engine.card, [forcing(again, outcome.rows)])["r", 0]
    assert found.prompt is not None
    np.testing.assert_allclose(found.prompt.columns["logprobs"], outcome.logprobs, rtol=0, atol=LOGPROB_TOLERANCE)
    np.testing.assert_array_equal(found.rows[:-1], outcome.rows)


def test_other_experts_are_taken_and_change_the_log_probs(free: Outcomes, forced: Outcomes, engine: Engine):
    for request in forced_requests(free, engine.card.routing.num_experts):
        told, outcome, freely = request.forced_routing, forced[request.request_id, 0], free[request.request_id, 0]
        assert told is not None and outcome.prompt is not None and freely.prompt is not None
        last = told.start + len(told.rows)
        np.testing.assert_array_equal(outcome.rows[told.start : last], told.rows)
        np.testing.assert_array_equal(outcome.rows[: told.start], freely.rows[: told.start])
        assert np.abs(outcome.prompt.columns["logprobs"] - freely.prompt.columns["logprobs"]).max() > 1e-2


def test_the_order_of_a_row_is_kept_and_changes_nothing_else(engine: Engine, free: Outcomes):
    (request, *_), outcome = free_requests(), free["f0", 0]
    rows = outcome.rows[: len(request.prompt_ids), :, ::-1]
    found = run_alone(engine.runner, engine.card, [forcing(request, rows)])["f0", 0]
    np.testing.assert_array_equal(found.rows[: len(rows)], rows)
    assert_same(found, outcome, routing=False)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_forced_outcomes_do_not_depend_on_scheduling(engine: Engine, free: Outcomes, forced: Outcomes, way: Way):
    requests = [*forced_requests(free, engine.card.routing.num_experts), *mixed_workload()[:4]]
    outcomes = run_together(engine.runner, engine.card, requests, way=way)
    assert_all_same({key: outcomes[key] for key in forced}, forced)


@pytest.mark.slow
def test_forced_outcomes_do_not_depend_on_data_ranks(two_ranks: Engine, free: Outcomes, forced: Outcomes):
    requests = forced_requests(free, two_ranks.card.routing.num_experts)
    assert_all_same(run_together(two_ranks.runner, two_ranks.card, requests, way=ON_TWO_RANKS), forced)


def test_nobody_finds_what_was_computed_under_forced_routing(engine: Engine, free: Outcomes, forced: Outcomes):
    cycle = cycle_for(engine.runner, engine.card, Way())
    free_request, forced_request = free_requests()[0], forced_requests(free, engine.card.routing.num_experts)[0]
    for request, expected in ((forced_request, forced), (free_request, free), (forced_request, forced)):
        (outcome,) = run_on(cycle, engine.card, [replace(request, score_prompt_from=69)]).values()
        assert outcome.num_cached == 0
        assert_same(replace(outcome, prompt=None), replace(expected["f0", 0], prompt=None))
    (again,) = run_on(cycle, engine.card, [replace(free_request, score_prompt_from=69)]).values()
    assert again.num_cached > 0, "what is free is shared"
    cycle.scheduler.flush()


def test_the_choices_of_a_forced_request_share_its_prompt(engine: Engine, free: Outcomes, forced: Outcomes):
    request = forced_requests(free, engine.card.routing.num_experts)[1]
    outcomes = run_alone(engine.runner, engine.card, [request])
    assert request.sampling.n == 2 and outcomes["f1", 1].num_cached == len(request.prompt_ids)
    assert_same_prompt(outcomes["f1", 1].prompt, forced["f1", 0].prompt)
