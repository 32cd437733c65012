"""Constrained answers keep to their constraints, and do not depend on how, when and next to whom they are computed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.requests.records import Constraint, GenerationRequest, RequestError
from tests.pipelines.conftest import ON_TWO_RANKS
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, preempt_every, run_alone, run_together
from tests.support.engine.workload import mixed_workload, request_for
from tests.support.text.constraints import PERSON, compiler, schema_constraint, synthetic_tokenizer

REGEX = "(ab|cd){2,12}"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 90, "ignore_eos": False}
CONSTRAINTS = (schema_constraint(PERSON), Constraint("regex", REGEX), Constraint("choice", '["one", "two"]'))
WAYS = {
    "together": Way(),
    "one step after the other": Way(overlaps=False),
    "chunks that cut pages": Way(chunk_tokens=7, step_tokens=48),
    "few rows": Way(num_rows=3),
    "preemption every 5 steps": Way(intervene=preempt_every(5)),
    "preemption, all forgotten": Way(chunk_tokens=64, intervene=preempt_every(8, forgets=True)),
}


def constrained() -> list[GenerationRequest]:
    """Requests with constraints, penalties, several choices, some greedy; prompts of one block and of several."""
    generator = np.random.default_rng(3)
    requests = []
    for i, length in enumerate([3, 40, 17, 70, 5, 33]):
        sampling = dict(SAMPLED, seed=i) | ({"n": 2} if i == 1 else {}) | ({"temperature": 0.0} if i == 4 else {})
        sampling |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3} if i % 3 == 2 else {}
        plain = request_for(generator.integers(3, 512, length).astype(np.int32), f"c{i}", **sampling)
        requests.append(replace(plain, constraint=CONSTRAINTS[i % 3], num_top_logprobs=2 * (i == 0)))
    return requests


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Outcomes:
    """Each constrained request alone; of the same module, so that those of others are computed once too."""
    return run_alone(engine.runner, engine.card, constrained(), way=Way(constraints=compiler()))


def check(outcomes: Outcomes) -> None:
    """Every answer that has stopped keeps to its constraint."""
    requests, num_stopped = {request.request_id: request for request in constrained()}, 0
    for (request_id, _), outcome in outcomes.items():
        if request_id not in requests or outcome.finish is None or outcome.finish.kind != "stop":
            continue
        text, constraint = synthetic_tokenizer().decode(outcome.ids[:-1]), requests[request_id].constraint
        num_stopped += 1
        if constraint == CONSTRAINTS[0]:
            jsonschema.validate(json.loads(text), PERSON)
        elif constraint == CONSTRAINTS[1]:
            assert re.fullmatch(REGEX, text)
        else:
            assert text in ("one", "two")
    assert num_stopped >= len(requests) - 1


def test_answers_keep_to_their_constraints(alone: Outcomes):
    check(alone)
    assert all(np.isfinite(outcome.logprobs).all() for outcome in alone.values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_constrained_answers_do_not_depend_on_scheduling_nor_plain_ones_on_them(engine: Engine, alone: Outcomes, way):
    plain = mixed_workload()[:8]
    alone = alone | run_alone(engine.runner, engine.card, plain)
    way = replace(way, constraints=compiler())
    assert_all_same(run_together(engine.runner, engine.card, [*constrained(), *plain], way=way), alone)


@pytest.mark.natively
def test_two_data_ranks_answer_as_one(two_ranks: Engine, alone: Outcomes):
    way = replace(ON_TWO_RANKS, constraints=compiler())
    assert_all_same(run_together(two_ranks.runner, two_ranks.card, constrained(), way=way), alone)


def test_log_probs_are_those_of_what_is_left(engine: Engine):
    params = {"max_new_tokens": 1, "temperature": 1.0, "regex": "[ab]", "seed": 1}
    answer = engine.generate("x", sampling_params=params, return_logprob=True, top_logprobs_num=4)
    assert isinstance(answer, dict)
    (top,) = answer["meta_info"]["output_top_logprobs"]
    assert np.exp([logprob for logprob, *_ in top[:2]]).sum() == pytest.approx(1.0, abs=1e-5)
    assert [logprob for logprob, *_ in top[2:]] == [-9999.0, -9999.0]


def test_an_empty_row_ends_with_an_error_and_the_others_go_on(engine: Engine):
    params = [{"regex": "ab", "max_new_tokens": 9}, {"max_new_tokens": 9, "ignore_eos": True}]
    (a,) = synthetic_tokenizer().encode("a", add_special_tokens=False)
    request = replace(
        request_for([5, 6], max_new_tokens=9, allowed_token_ids=(a,)), constraint=Constraint("regex", "ab")
    )
    other = request_for([5, 6], "other", max_new_tokens=9)
    outcomes = run_together(engine.runner, engine.card, [request, other], way=Way(constraints=compiler()))
    finish = outcomes["r", 0].finish
    assert finish is not None and (finish.kind, finish.source) == ("error", "constraint")
    assert outcomes["r", 0].ids == [a] and len(outcomes["other", 0].ids) == 9
    assert all(answer["meta_info"]["finish_reason"] for answer in engine.generate(["x", "y"], sampling_params=params))


@pytest.mark.parametrize("regex", ["(?=a)b", "((a", "[b-a]"])
def test_what_cannot_be_used_is_refused_before_it_runs(engine: Engine, regex):
    with pytest.raises(RequestError, match="expression"):
        engine.generate("x", sampling_params={"regex": regex})


def test_a_stream_comes_to_the_whole_answer(engine: Engine):
    params = {"json_schema": json.dumps(PERSON), "max_new_tokens": 90, "temperature": 1.0}
    whole = engine.generate("x", sampling_params=params, seed=5)
    *_, last = engine.generate_stream("x", sampling_params=params, seed=5)
    assert isinstance(whole, dict) and last["text"] == whole["text"]
    jsonschema.validate(json.loads(whole["text"]), PERSON)
