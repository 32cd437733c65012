"""What a request gets does not depend on how, when and next to whom it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.cycle import StepCycle
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import Outcomes, assert_all_same, assert_same, outcome_of_answer
from tests.support.engine.run_requests import Way, preempt_every, run_together, without_routing
from tests.support.engine.shared_settings import ONE_BUCKET
from tests.support.engine.workload import engine_arguments, mixed_workload

WAYS = {
    "together": Way(),
    "chunks of 16": Way(chunk_tokens=16),
    "chunks of 64": Way(chunk_tokens=64),
    "chunks that cut pages": Way(chunk_tokens=7, step_tokens=48),
    "few rows": Way(num_rows=3),
    "preemption every 5 steps": Way(intervene=preempt_every(5)),
    "preemption every 8 steps, chunks of 64, all forgotten": Way(
        chunk_tokens=64, intervene=preempt_every(8, forgets=True)
    ),
    "pages for two long sequences": Way(num_pages=29),
    "one step after the other": Way(overlaps=False),
    "one step after the other, preemption, few pages": Way(overlaps=False, num_pages=29, intervene=preempt_every(6)),
    "no cached prefixes": Way(caches_prefixes=False, intervene=preempt_every(9)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_outputs_do_not_depend_on_scheduling(engine: Engine, alone: Outcomes, way: Way):
    assert_all_same(run_together(engine.runner, engine.card, mixed_workload(), way=way), alone)


def test_few_pages_do_preempt(engine: Engine, alone: Outcomes):
    preempted: set[str] = set()

    def note_preempted(cycle: StepCycle, step: int) -> None:
        preempted.update(s.request.request_id for s in cycle.scheduler.waiting if s.queue.num_to_recompute)

    way = replace(WAYS["pages for two long sequences"], intervene=note_preempted)
    outcomes = run_together(engine.runner, engine.card, mixed_workload(), way=way)
    kinds = {kind for outcome in outcomes.values() if outcome.routing for _, _, kind in outcome.routing.source}
    assert len(preempted) > 1 and "recomputed" in kinds
    assert_all_same(outcomes, alone)


def test_outputs_do_not_depend_on_asking_for_routing(engine: Engine, alone: Outcomes):
    every_other = [request if i % 2 else without_routing(request) for i, request in enumerate(mixed_workload())]
    outcomes = run_together(engine.runner, engine.card, every_other)
    for request in every_other:
        for choice in range(request.sampling.n):
            key = request.request_id, choice
            assert_same(outcomes[key], alone[key], routing=request.return_routed_experts)
            assert request.return_routed_experts or outcomes[key].routing is None


@pytest.mark.slow
def test_outputs_do_not_depend_on_capturing_routing(engine_with: EngineStore, alone: Outcomes):
    server_without = engine_with(enable_return_routed_experts=False, **ONE_BUCKET)
    requests = [without_routing(request) for request in mixed_workload()]
    way = Way(step_tokens=64, chunk_tokens=64, with_capture=False)
    outcomes = run_together(server_without.runner, server_without.card, requests, way=way)
    assert_all_same(outcomes, alone, routing=False)


@pytest.mark.float32("devices add up parts of sums")
@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
def test_outputs_do_not_depend_on_devices(engine_with: EngineStore, alone: Outcomes, num_devices: int):
    spread = engine_with(devices_per_host=num_devices, **ONE_BUCKET)
    way = Way(step_tokens=64, chunk_tokens=64)
    assert_all_same(run_together(spread.runner, spread.card, mixed_workload(), way=way), alone)


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 4, "precompile_bs_paddings": [4], "max_running_requests": 4, "num_pages": 300},
        pytest.param(
            {"page_size": 64, "precompile_bs_paddings": [1], "max_running_requests": 1, "num_pages": 20},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda settings: f"pages of {settings['page_size']}, batches of {settings['max_running_requests']}",
)
def test_outputs_do_not_depend_on_page_size_or_bucket(engine_with: EngineStore, alone: Outcomes, settings: dict):
    other = engine_with(max_step_tokens=64, **settings)
    assert_all_same(_through_engine(other), alone, index=False)


def test_outputs_of_the_engine_are_those_of_its_steps(engine: Engine, alone: Outcomes):
    assert_all_same(_through_engine(engine), alone, index=False)


def _through_engine(engine: Engine) -> Outcomes:
    """Run the workload through the engine's own thread, all at once."""
    outcomes: Outcomes = {}
    workload = mixed_workload()
    answers = engine.generate(
        input_ids=[request.prompt_ids.tolist() for request in workload],
        sampling_params=[engine_arguments(request)["sampling_params"] for request in workload],
        return_logprob=True,
        return_routed_experts=True,
    )
    assert isinstance(answers, list)
    keys = [(request.request_id, i) for request in workload for i in range(request.sampling.n)]
    for key, answer in zip(keys, answers, strict=True):
        outcomes[key] = outcome_of_answer(answer, engine.card.routing)
    return outcomes
