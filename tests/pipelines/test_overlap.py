"""Whether steps overlap does not show, also where a sequence ends while its next token is on its way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest
from tests.support.engine.outputs import Outcome, Outcomes, assert_same
from tests.support.engine.run_requests import Way, preempt_every, run_together
from tests.support.engine.workload import mixed_workload

WAYS = {
    "roomy": Way(),
    "chunks of 16, three rows": Way(chunk_tokens=16, num_rows=3),
    "tight, preemption every 7 steps": Way(num_pages=29, intervene=preempt_every(7)),
}
ABORTED_AFTER = {"w1": 1, "w4": 6, "w10": 3, "w13": 9}
"""How many tokens of its first choice a request has when it is aborted, or more."""


def with_stop_ids(request: GenerationRequest, alone: Outcomes) -> GenerationRequest:
    """The same request, stopped by a token of its own answer."""
    ids = alone[request.request_id, 0].ids
    place = int(request.request_id[1:]) % 11
    stops = (ids[place],) if ids else (3,)
    return replace(request, sampling=replace(request.sampling, stop_token_ids=stops))


def cut_at_stop(outcome: Outcome, request: GenerationRequest) -> Outcome:
    """What a choice comes to when it ends with the first of its stop ids."""
    places = [i for i, token in enumerate(outcome.ids) if token in request.sampling.stop_token_ids]
    if not places:
        return outcome
    count = places[0] + 1
    num_rows = len(request.prompt_ids) + count - 1
    assert outcome.routing is not None
    finish = FinishReason("stop", matched=outcome.ids[places[0]])
    routing = replace(outcome.routing, rows=outcome.rows[:num_rows])
    return Outcome(outcome.ids[:count], outcome.logprobs[:count], finish, routing)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_stop_id_ends_its_choice_and_the_token_after_it_shows_nowhere(
    engine: Engine, alone: Outcomes, way: Way, overlaps: bool
):
    requests = [with_stop_ids(request, alone) for request in mixed_workload()]
    outcomes = run_together(engine.runner, engine.card, requests, way=replace(way, overlaps=overlaps))
    kinds = set()
    for request in requests:
        for choice in range(request.sampling.n):
            key = request.request_id, choice
            assert_same(outcomes[key], cut_at_stop(alone[key], request))
            kinds.add(outcomes[key].finish.kind)
    assert kinds == {"stop", "length"}


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("num_pages", [200, 29])
def test_an_abort_cuts_its_request_and_nobody_else(engine: Engine, alone: Outcomes, num_pages: int, overlaps: bool):
    def abort_some(cycle: StepCycle, step: int):
        due = [s for s in cycle.scheduler.running if s.num_outputs >= ABORTED_AFTER.get(s.request.request_id, 1000)]
        choices = {choice for s in due for choice in s.group.choices if choice.finish is None}
        return [cycle.end(choice, FinishReason("abort")) for choice in choices]

    way = Way(num_pages=num_pages, overlaps=overlaps, intervene=abort_some)
    outcomes = run_together(engine.runner, engine.card, mixed_workload(), way=way)
    for key, outcome in outcomes.items():
        if key[0] not in ABORTED_AFTER:
            assert_same(outcome, alone[key])
            continue
        count = len(outcome.ids)
        assert outcome.finish is not None and outcome.finish.kind == "abort" and outcome.ids == alone[key].ids[:count]
        assert outcome.logprobs == pytest.approx(alone[key].logprobs[:count], abs=1e-5)
        assert key[1] > 0 or count >= ABORTED_AFTER[key[0]]
        assert outcome.routing is not None
        known = outcome.rows[: outcome.routing.missing[0][0]] if outcome.routing.missing else outcome.rows
        assert (known == alone[key].rows[: len(known)]).all()
