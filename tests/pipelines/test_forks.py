"""Several choices of a request compute its prompt once; of what each comes to, nothing depends on that."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.requests.records import GenerationRequest
from tests.pipelines.conftest import ON_TWO_RANKS
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import (
    Intervention,
    Way,
    cycle_for,
    preempt_every,
    run_alone,
    run_on,
    run_together,
)
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.models.core import PAGE_SIZE

NUM_CHOICES = 8
SAMPLINGS = ({}, {"temperature": 1.0, "seed": 21, "repetition_penalty": 1.2, "frequency_penalty": 0.3})


def preempt_early(*places: int) -> Intervention:
    """Preempt the sequences at these places when the first step with a prompt's end is planned, and not committed."""

    def intervene(cycle: StepCycle, step: int) -> None:
        running = cycle.scheduler.running
        if step == 1:
            for sequence in [running[place] for place in places if place < len(running)][::-1]:
                cycle.scheduler.preempt(sequence)

    return intervene


WAYS = {
    "plain": Way(),
    "chunks": Way(chunk_tokens=PAGE_SIZE),
    "without overlap": Way(overlaps=False),
    "few rows": Way(num_rows=3),
    "few pages": Way(num_pages=11),
    "private": Way(caches_prefixes=False),
    "preempted": Way(intervene=preempt_every(3)),
    "preempted, pages lost": Way(intervene=preempt_every(5, forgets=True)),
    "first preempted before it has sampled": Way(intervene=preempt_early(0)),
    "another preempted before it has sampled": Way(intervene=preempt_early(3)),
    "all preempted before they have sampled": Way(intervene=preempt_early(*range(NUM_CHOICES))),
}


QUICK = ("plain", "another preempted before it has sampled")


def requests_of(length: int, *, num_new: int = 9) -> list[GenerationRequest]:
    """A greedy request and one that draws and is penalised, both with several choices of one prompt."""
    prompt = draw_prompt(np.random.default_rng(length), length)
    return [
        request_for(prompt, f"{i}", n=NUM_CHOICES, max_new_tokens=num_new, **sampling)
        for i, sampling in enumerate(SAMPLINGS)
    ]


def one_by_one(engine: Engine, length: int, *, way: Way | None = None) -> Outcomes:
    """The same choices as requests of their own, each with nothing cached."""
    outcomes: Outcomes = {}
    for request in requests_of(length):
        for choice in range(NUM_CHOICES):
            sampling = SAMPLINGS[int(request.request_id)]
            alone = request_for(request.prompt_ids, max_new_tokens=9, first_choice=choice, **sampling)
            (outcomes[request.request_id, choice],) = run_alone(engine.runner, engine.card, [alone], way=way).values()
    return outcomes


@pytest.fixture(
    scope="module", params=[37, *(pytest.param(length, marks=pytest.mark.slow) for length in (5, PAGE_SIZE))]
)
def length(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def expected(engine: Engine, length: int) -> Outcomes:
    return one_by_one(engine, length)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WAYS])
def test_forks_do_not_show(engine: Engine, length: int, expected: Outcomes, name: str):
    outcomes: Outcomes = {}
    for request in requests_of(length):
        outcomes |= run_together(engine.runner, engine.card, [request], way=WAYS[name])
    assert_all_same(outcomes, expected)
    assert_all_same(run_together(engine.runner, engine.card, requests_of(length), way=WAYS[name]), expected)


def test_forks_off_a_cached_prefix_do_not_show(engine: Engine, length: int, expected: Outcomes):
    cycle = cycle_for(engine.runner, engine.card, Way())
    first, second = requests_of(length)
    outcomes = run_on(cycle, engine.card, [first]) | run_on(cycle, engine.card, [second])
    cycle.scheduler.flush()
    assert_all_same(outcomes, expected)


@pytest.mark.slow
@pytest.mark.float32("devices add up parts of sums")
def test_forks_on_two_data_ranks_do_not_show(two_ranks: Engine, length: int, expected: Outcomes):
    for requests in ([request] for request in requests_of(length)):
        outcomes = run_together(two_ranks.runner, two_ranks.card, requests, way=ON_TWO_RANKS)
        assert_all_same(outcomes, {key: expected[key] for key in outcomes})


@pytest.mark.parametrize("num_new", [0, 1])
@pytest.mark.parametrize("way", [Way(), Way(chunk_tokens=PAGE_SIZE), Way(caches_prefixes=False)])
def test_every_token_of_a_prompt_is_computed_once(engine: Engine, length: int, way: Way, num_new: int):
    cycle = cycle_for(engine.runner, engine.card, way)
    outcomes = run_on(cycle, engine.card, requests_of(length, num_new=num_new)[:1])
    cycle.scheduler.flush()
    assert cycle.statistics()["tokens_computed"] == length
    assert [outcomes["0", choice].num_cached for choice in range(NUM_CHOICES)] == [0] + [length] * 7
    for outcome in outcomes.values():
        assert outcome.routing is not None and outcome.routing.missing == ()
        assert len(outcome.routing.rows) == length
