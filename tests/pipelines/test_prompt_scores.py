"""The scores of a prompt are the model's own, however the prompt is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.requests.columns import as_array
from tests.pipelines.conftest import ON_TWO_RANKS
from tests.support.engine.outputs import Outcomes, assert_all_same, assert_same_prompt
from tests.support.engine.run_requests import (
    Way,
    cycle_for,
    kept_tokens,
    preempt_every,
    run_alone,
    run_on,
    run_together,
    tolerance_of,
)
from tests.support.engine.sampling_reference import log_softmax, scoring_requests
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for
from tests.support.models.full_logits import prompt_logits_of

WAYS = {
    "together": Way(),
    "chunks that cut pages": Way(chunk_tokens=7, step_tokens=48),
    "single tokens": Way(chunk_tokens=1),
    "few rows": Way(num_rows=2),
    "preemption every 2 steps": Way(chunk_tokens=16, intervene=preempt_every(2)),
    "preemption every 4 steps, all forgotten": Way(chunk_tokens=64, intervene=preempt_every(4, forgets=True)),
    "one step after the other": Way(overlaps=False, chunk_tokens=32),
    "no cached prefixes": Way(caches_prefixes=False),
}


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Outcomes:
    return run_alone(engine.runner, engine.card, scoring_requests())


def test_scores_are_log_probs_of_the_logits(engine: Engine, alone: Outcomes):
    logits_of, tolerance = prompt_logits_of(engine.runner, longest=112), tolerance_of(engine.runner)
    for request in scoring_requests():
        prompt, first = request.prompt_ids, request.score_prompt_from
        expected = log_softmax(logits_of(prompt.tolist()))[first:-1]
        for choice in range(request.sampling.n):
            prompt_columns = alone[request.request_id, choice].prompt
            assert prompt_columns is not None and prompt_columns.starts["logprobs"] == first
            scores = prompt_columns.columns
            assert len(scores["logprobs"]) == len(prompt) - 1 - first
            of_tokens = expected[np.arange(len(expected)), prompt[first + 1 :]]
            np.testing.assert_allclose(scores["logprobs"], of_tokens, rtol=0, atol=tolerance)
            least = 1 + np.sum(expected > of_tokens[:, None] + tolerance, axis=1)
            most = np.sum(expected >= of_tokens[:, None] - tolerance, axis=1)
            assert np.all((least <= scores["ranks"]) & (scores["ranks"] <= most))
            assert ("top_ids" in scores) == (request.num_top_logprobs > 0)
            if "top_ids" in scores:
                falling = -np.sort(-expected, axis=1)[:, : request.num_top_logprobs]
                np.testing.assert_allclose(scores["top_logprobs"], falling, rtol=0, atol=tolerance)
                at_ids = np.take_along_axis(expected, as_array(scores["top_ids"]).astype(np.int64), axis=1)
                np.testing.assert_allclose(scores["top_logprobs"], at_ids, rtol=0, atol=tolerance)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_scores_do_not_depend_on_scheduling(engine: Engine, alone: Outcomes, way: Way):
    assert_all_same(scored_among_others(engine, alone, way), alone)


def scored_among_others(engine: Engine, alone: Outcomes, way: Way) -> Outcomes:
    """Return the outcomes of the same requests beside others."""
    requests = [*scoring_requests(), *mixed_workload()[:4]]
    outcomes = run_together(engine.runner, engine.card, requests, way=way)
    return {key: outcomes[key] for key in alone}


@pytest.mark.natively
def test_scores_do_not_depend_on_data_ranks(two_ranks: Engine, alone: Outcomes):
    assert_all_same(run_together(two_ranks.runner, two_ranks.card, scoring_requests(), way=ON_TWO_RANKS), alone)


def test_a_prompt_that_was_sampled_scores_as_it_was_sampled(engine: Engine):
    prompt = draw_prompt(np.random.default_rng(2), 37)
    sampled = run_alone(engine.runner, engine.card, [request_for(prompt, max_new_tokens=30, temperature=1.0, seed=8)])
    outcome = sampled["r", 0]
    again = request_for([*prompt, *outcome.ids], max_new_tokens=0)
    found = run_alone(engine.runner, engine.card, [replace(again, score_prompt_from=36)])["r", 0].prompt
    assert found is not None
    np.testing.assert_allclose(found.columns["logprobs"], outcome.logprobs, rtol=0, atol=outcome.tolerance)


def test_a_cached_prefix_is_used_up_to_where_scores_begin(engine: Engine, alone: Outcomes):
    cycle, kept = cycle_for(engine.runner, engine.card, Way()), kept_tokens(engine.runner)
    for request in scoring_requests():
        plain = replace(request, request_id="plain", score_prompt_from=None, num_top_logprobs=0)
        run_on(cycle, engine.card, [plain])
        outcomes = run_on(cycle, engine.card, [request])
        first = request.score_prompt_from
        assert first is not None
        for (_, choice), outcome in outcomes.items():
            expected = alone[request.request_id, choice].prompt
            assert_same_prompt(outcome.prompt, expected, tolerance=outcome.tolerance)
            if choice == 0:
                assert outcome.num_cached == first // kept * kept
    cycle.scheduler.flush()
