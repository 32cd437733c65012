"""Penalties, biases and likeliest tokens are those of their definition, however a sequence is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.requests.columns import as_array
from tests.pipelines.conftest import ON_TWO_RANKS
from tests.support.engine.outputs import LOGPROB_TOLERANCE, Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, preempt_every, run_alone, run_together
from tests.support.engine.sampling_reference import ENDING, adjusted_requests, logprobs_by_definition
from tests.support.engine.workload import mixed_workload
from tests.support.models.full_logits import prompt_logits_of

WAYS = {
    "together": Way(),
    "chunks that cut pages": Way(chunk_tokens=7, step_tokens=48),
    "few rows": Way(num_rows=2),
    "preemption every 3 steps": Way(intervene=preempt_every(3)),
    "preemption every 4 steps, all forgotten": Way(intervene=preempt_every(4, forgets=True)),
    "one step after the other": Way(overlaps=False, intervene=preempt_every(7)),
    "no cached prefixes": Way(caches_prefixes=False),
}


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Outcomes:
    return run_alone(engine.runner, engine.card, adjusted_requests())


@pytest.fixture(scope="module")
def logits_of(engine: Engine) -> Callable[[Sequence[int]], np.ndarray]:
    return prompt_logits_of(engine.runner, longest=112)


@pytest.mark.slow
def test_every_token_is_chosen_and_scored_by_definition(alone: Outcomes, logits_of):
    for request in adjusted_requests():
        for choice in range(request.sampling.n):
            outcome = alone[request.request_id, choice]
            expected = logprobs_by_definition(request, outcome.ids, logits_of)
            chosen = expected[np.arange(len(outcome.ids)), outcome.ids]
            np.testing.assert_allclose(outcome.logprobs, chosen, rtol=0, atol=LOGPROB_TOLERANCE)
            if request.sampling.temperature == 0:
                np.testing.assert_allclose(chosen, expected.max(axis=1), rtol=0, atol=LOGPROB_TOLERANCE)


def test_the_likeliest_tokens_are_those_of_the_same_distribution(alone: Outcomes, logits_of):
    num_checked = 0
    for request in adjusted_requests():
        for choice in range(request.sampling.n if request.num_top_logprobs else 0):
            outcome = alone[request.request_id, choice]
            top_ids, top_logprobs = (as_array(outcome.columns[name]) for name in ("top_ids", "top_logprobs"))
            assert top_ids.shape == (len(outcome.ids), request.num_top_logprobs)
            expected = logprobs_by_definition(request, outcome.ids, logits_of)
            falling = -np.sort(-expected, axis=1)[:, : request.num_top_logprobs]
            np.testing.assert_allclose(top_logprobs, falling, rtol=0, atol=LOGPROB_TOLERANCE)
            at_ids = np.take_along_axis(expected, top_ids.astype(np.int64), axis=1)
            np.testing.assert_allclose(top_logprobs, at_ids, rtol=0, atol=LOGPROB_TOLERANCE)
            num_checked += 1
    assert num_checked == 8


def test_nothing_ends_before_as_many_tokens_as_are_wanted(alone: Outcomes):
    withheld = [request for request in adjusted_requests() if request.sampling.min_new_tokens]
    for request in withheld:
        for choice in range(request.sampling.n):
            ids, least = alone[request.request_id, choice].ids, request.sampling.min_new_tokens
            assert len(ids) >= least and not set(ids[:least]) & set(ENDING)
    assert any(
        outcome.ids[-1] in ENDING for (name, _), outcome in alone.items() if name in ("adjusted 7", "adjusted 8")
    )


def test_adjusting_changes_what_is_sampled(engine: Engine, alone: Outcomes):
    for request in adjusted_requests()[:1]:
        ids = alone[request.request_id, 0].ids
        assert len(set(ids)) == len(ids), "a strong repetition penalty forbids repeating"
    assert all(99 not in outcome.ids for (name, _), outcome in alone.items() if name in ("adjusted 3", "adjusted 5"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_adjusted_outputs_do_not_depend_on_scheduling(engine: Engine, alone: Outcomes, way: Way):
    requests = [*adjusted_requests(), *mixed_workload()[:4]]
    outcomes = run_together(engine.runner, engine.card, requests, way=way)
    assert_all_same({key: outcomes[key] for key in alone}, alone)


@pytest.mark.slow
def test_adjusted_outputs_do_not_depend_on_data_ranks(two_ranks: Engine, alone: Outcomes):
    assert_all_same(run_together(two_ranks.runner, two_ranks.card, adjusted_requests(), way=ON_TWO_RANKS), alone)
