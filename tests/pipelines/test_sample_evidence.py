"""Log-probs of listed ids, entropy and the model's own log-probs: what they are, and that nothing depends on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.requests.records import Constraint, GenerationRequest, RequestError
from tests.pipelines.conftest import ON_TWO_RANKS
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, preempt_every, run_alone, run_together
from tests.support.engine.workload import draw_prompt, mixed_workload, request_for
from tests.support.text.constraints import compiler

PROMPT = [*range(40, 75)]
LISTED = [7, 300, 511, 0]
CLOSE = {"rel": 0, "abs": 1e-5}
WAYS = {
    "together": Way(),
    "one step after the other": Way(overlaps=False),
    "preemption every 5 steps": Way(intervene=preempt_every(5), chunk_tokens=7, step_tokens=48),
}


def asking() -> list[GenerationRequest]:
    """Requests that ask for all kinds of evidence, beside penalties, constraints, choices, likeliest tokens."""
    generator = np.random.default_rng(5)
    kinds: list[dict[str, Any]] = [
        {"logprob_token_ids": (3, 9, 200)},
        {"return_entropy": True},
        {"raw_logprobs": True, "num_top_logprobs": 3},
        {"raw_logprobs": True, "logprob_token_ids": tuple(range(128)), "return_entropy": True},
        {"logprob_token_ids": (500,), "constraint": Constraint("regex", "(ab|cd){2,12}")},
        {"return_sampling_mask": True, "raw_logprobs": True},
        {"return_sampling_mask": True, "constraint": Constraint("regex", "[a-z]{2,12}")},
    ]
    requests = []
    for i, kind in enumerate(kinds):
        sampling: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.5 * i, "seed": i, "n": 1 + (i == 3)}
        sampling |= {"top_k": 30, "top_p": 0.8, "min_p": 0.01} if i > 4 else {}
        sampling |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3} if i % 2 else {}
        requests.append(replace(request_for(draw_prompt(generator, 3 + 14 * i), f"e{i}", **sampling), **kind))
    return requests


def without_evidence(request: GenerationRequest) -> GenerationRequest:
    return replace(request, logprob_token_ids=(), return_entropy=False, raw_logprobs=False, return_sampling_mask=False)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Outcomes:
    return run_alone(engine.runner, engine.card, asking(), way=Way(constraints=compiler()))


def answer_of(engine: Engine, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 6, "temperature": 0.6, "ignore_eos": True, "frequency_penalty": 0.5}
    asked = {"input_ids": PROMPT, "sampling_params": params, "seed": 3, "return_logprob": True}
    answer = engine.generate(**(asked | fields))
    assert isinstance(answer, dict)
    return answer


def values(entries: list) -> list[float]:
    return [value for value, *_ in entries]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_evidence_does_not_depend_on_scheduling_nor_plain_answers_on_it(engine: Engine, alone: Outcomes, way: Way):
    plain = mixed_workload()[:6]
    expected = alone | run_alone(engine.runner, engine.card, plain)
    way = replace(way, constraints=compiler())
    assert_all_same(run_together(engine.runner, engine.card, [*asking(), *plain], way=way), expected)


@pytest.mark.natively
def test_two_data_ranks_find_what_one_does(two_ranks: Engine, alone: Outcomes):
    way = replace(ON_TWO_RANKS, constraints=compiler())
    assert_all_same(run_together(two_ranks.runner, two_ranks.card, asking(), way=way), alone)


def test_what_is_sampled_does_not_depend_on_what_is_asked(engine: Engine, alone: Outcomes):
    requests = list(map(without_evidence, asking()))
    plain = run_alone(engine.runner, engine.card, requests, way=Way(constraints=compiler()))
    assert {key: outcome.ids for key, outcome in plain.items()} == {key: outcome.ids for key, outcome in alone.items()}


def test_the_model_s_own_log_probs_are_those_that_scoring_gives(engine: Engine):
    raw = answer_of(engine, logprobs_mode="raw_logprobs", token_ids_logprob=LISTED, top_logprobs_num=2)
    processed = answer_of(engine)
    assert raw["output_ids"] == processed["output_ids"]
    text, meta = PROMPT + raw["output_ids"], raw["meta_info"]
    score = {"sampling_params": {"max_new_tokens": 0}, "logprob_start_len": len(PROMPT) - 1, "top_logprobs_num": 2}
    scored = answer_of(engine, input_ids=text, **score)["meta_info"]
    assert values(meta["output_token_logprobs"]) == pytest.approx(values(scored["input_token_logprobs"][1:]), **CLOSE)
    for own, expected in zip(meta["output_top_logprobs"], scored["input_top_logprobs"][1:], strict=True):
        assert [entry[1] for entry in own] == [entry[1] for entry in expected]
        assert values(own) == pytest.approx(values(expected), **CLOSE)
    assert values(processed["meta_info"]["output_token_logprobs"]) != pytest.approx(
        values(meta["output_token_logprobs"])
    )
    place = 2
    for value, token_id, _ in meta["output_token_ids_logprobs"][place]:
        score = {"sampling_params": {"max_new_tokens": 0}, "logprob_start_len": len(PROMPT) + place - 1}
        told = answer_of(engine, input_ids=[*text[: len(PROMPT) + place], token_id], **score)["meta_info"]
        assert value == pytest.approx(told["input_token_logprobs"][-1][0], **CLOSE)


def test_entropy_and_listed_log_probs_are_of_what_may_be_sampled(engine: Engine):
    params = {"max_new_tokens": 5, "temperature": 1.5, "ignore_eos": True, "logit_bias": {"7": 3, "9": -1}}
    params["allowed_token_ids"] = [7, 9, 300]
    meta = answer_of(engine, sampling_params=params, token_ids_logprob=[9, 300, 7, 8], return_entropy=True)["meta_info"]
    assert len(meta["output_token_entropy"]) == len(meta["output_token_ids_logprobs"]) == 5
    for entropy, listed in zip(meta["output_token_entropy"], meta["output_token_ids_logprobs"], strict=True):
        assert [token_id for _, token_id, _ in listed] == [9, 300, 7, 8] and listed[3][0] == -9999.0
        logprobs = np.array(values(listed[:3]))
        assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-5)
        assert entropy == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), **CLOSE)


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.9}, {}])
def test_the_sampling_mask_is_what_truncation_leaves(engine: Engine, limits: dict[str, float]):
    """In the order of ids, of the distribution that is sampled; log-probs are those among them."""
    params = {"max_new_tokens": 4, "temperature": 1.3, "ignore_eos": True, "logit_bias": {"7": 2}, **limits}
    asked = {"sampling_params": params, "return_sampling_mask": True, "seed": 9}
    meta = answer_of(engine, **asked, token_ids_logprob=[*range(128)])["meta_info"]
    parts = [
        answer_of(engine, **asked, token_ids_logprob=[*range(i, i + 128)])["meta_info"] for i in range(0, 512, 128)
    ]
    assert meta["output_token_sampling_mask_length"] == 4
    for place, (logprob, token_id, _) in enumerate(meta["output_token_logprobs"]):
        logprobs = np.array([value for part in parts for value, *_ in part["output_token_ids_logprobs"][place]])
        order = np.argsort(-logprobs, kind="stable")
        kept = order[: limits.get("top_k", 512)]
        mass = np.exp(logprobs[kept])
        kept = kept[np.cumsum(mass) - mass < limits.get("top_p", 1.0) * mass.sum()]
        kept = kept[logprobs[kept] >= logprobs.max() + np.log(limits.get("min_p", 0) or 1e-300)]
        assert meta["output_token_sampling_mask"][place] == sorted(kept.tolist()) and token_id in kept
        expected = logprob - np.logaddexp.reduce(logprobs[kept])
        assert meta["output_token_sampling_logprobs"][place] == pytest.approx(expected, **CLOSE)


def test_a_greedy_sample_is_all_its_sampling_mask(engine: Engine):
    asked = {"sampling_params": {"max_new_tokens": 3, "temperature": 0}, "return_sampling_mask": True}
    answer = answer_of(engine, **asked)
    assert answer["meta_info"]["output_token_sampling_mask"] == [[each] for each in answer["output_ids"]]
    assert answer["meta_info"]["output_token_sampling_logprobs"] == [0.0] * len(answer["output_ids"])


def test_a_stream_has_the_same_evidence(engine: Engine):
    asked = {"token_ids_logprob": LISTED, "return_entropy": True, "logprobs_mode": "raw_logprobs"}
    asked["return_sampling_mask"] = True
    whole = answer_of(engine, **asked)["meta_info"]
    params = {"max_new_tokens": 6, "temperature": 0.6, "ignore_eos": True, "frequency_penalty": 0.5}
    *_, last = engine.generate_stream(input_ids=PROMPT, sampling_params=params, seed=3, return_logprob=True, **asked)
    names = ["output_token_ids_logprobs", "output_token_entropy", "output_token_logprobs"]
    names += ["output_token_sampling_mask", "output_token_sampling_logprobs"]
    assert [last["meta_info"][name] for name in names] == [whole[name] for name in names]


def test_the_model_s_own_need_no_program_where_they_are_sampled(engine: Engine):
    """At temperatures 0 and 1 without anything that changes logits both are the same."""
    for temperature in (0, 1):
        asked = {"sampling_params": {"temperature": temperature, "max_new_tokens": 3}, "seed": 1}
        own, other = (answer_of(engine, logprobs_mode=f"{mode}_logprobs", **asked) for mode in ("raw", "processed"))
        assert own["meta_info"]["output_token_logprobs"] == other["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids_logprob": [512]}, "logprob_token_ids"),
        ({"token_ids_logprob": [*range(129)]}, "token_ids_logprob"),
        ({"logprobs_mode": "raw"}, "logprobs_mode"),
    ],
)
def test_what_is_not_computed_is_refused(engine: Engine, fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as refused:
        answer_of(engine, **fields)
    assert refused.value.param == param
