"""A compiled batch padding holds any number of requests up to itself; company and order do not show."""

from __future__ import annotations

import pytest

from rayserve_moe import Engine
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import Outcome, Outcomes, assert_same, outcome_of_answer
from tests.support.engine.run_requests import run_alone
from tests.support.engine.workload import engine_arguments, mixed_workload, request_for

NUM_NEW = 12
PADDED = {
    1: {"page_size": 64, "precompile_bs_paddings": [1], "max_running_requests": 1, "num_pages": 20},
    4: {"page_size": 4, "precompile_bs_paddings": [4], "max_running_requests": 4, "num_pages": 300},
}
"""By batch padding; the same engines serve `test_independence`."""


@pytest.fixture(scope="module")
def requests() -> list:
    prompts = [request.prompt_ids for request in mixed_workload()[:4]]
    return [request_for(prompt, f"b{i}", max_new_tokens=NUM_NEW) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def each_alone(engine: Engine, requests: list) -> Outcomes:
    return run_alone(engine.runner, engine.card, requests)


@pytest.mark.parametrize(
    ("padding", "num_requests", "in_turn"),
    [
        pytest.param(1, 1, False, id="1 in 1", marks=pytest.mark.slow),
        pytest.param(4, 1, False, id="1 in 4"),
        pytest.param(4, 3, False, id="3 in 4"),
        pytest.param(4, 4, False, id="4 in 4"),
        pytest.param(1, 3, True, id="3 in turn in 1", marks=pytest.mark.slow),
    ],
)
def test_a_batch_padding_does_not_show(
    engine_with: EngineStore, requests: list, each_alone: Outcomes, padding: int, num_requests: int, in_turn: bool
):
    padded = engine_with(max_step_tokens=64, **PADDED[padding])
    chosen = requests[:num_requests]
    if in_turn:
        answers = [padded.generate(**engine_arguments(request)) for request in chosen]
    else:
        answers = padded.generate(
            input_ids=[request.prompt_ids.tolist() for request in chosen],
            max_new_tokens=NUM_NEW,
            temperature=0,
            ignore_eos=True,
            return_logprob=True,
            return_routed_experts=True,
        )
    for request, answer in zip(chosen, answers, strict=True):
        found: Outcome = outcome_of_answer(answer, padded.card.routing)
        assert len(found.rows) == len(request.prompt_ids) + NUM_NEW - 1
        assert_same(found, each_alone[request.request_id, 0])
