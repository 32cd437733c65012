"""Logit processors of an operator: what they do to logits, and that nothing else depends on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.requests.records import Constraint, GenerationRequest, RequestError
from tests.pipelines.conftest import ON_TWO_RANKS, EngineStore
from tests.support.engine.host_runners import shared_by_many
from tests.support.engine.outputs import LOGPROB_TOLERANCE, Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, preempt_every, run_alone, run_together
from tests.support.engine.sampling_reference import log_softmax
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.models.full_logits import prompt_logits_of
from tests.support.speculation.random_requests import PLAIN, PROCESSED, SPECULATES
from tests.support.text.constraints import compiler

WAYS = {
    "together": PLAIN,
    "one step after the other": replace(PLAIN, overlaps=False),
    "preemption every 5 steps": replace(PLAIN, chunk_tokens=16, intervene=preempt_every(5)),
    "preemption every 4 steps, all forgotten": replace(PLAIN, intervene=preempt_every(4, forgets=True)),
}


def asking() -> list[GenerationRequest]:
    """Requests for processors beside penalties, a constraint, choices, evidence, and prompts that repeat themselves."""
    generator, requests = np.random.default_rng(3), []
    for i in range(6):
        sampling: dict[str, Any] = {"max_new_tokens": 10, "seed": i, "temperature": (0.0, 1.0, 0.7)[i % 3]}
        sampling |= {"n": 3} if i == 1 else {"repetition_penalty": 1.3} if i == 4 else {}
        prompt = np.concatenate([draw_prompt(generator, 4 + 7 * i)] * 2)
        request = request_for(prompt, f"p{i}", processor_arguments=PROCESSED[i % 3], **sampling)
        requests.append(replace(request, return_entropy=i == 2, raw_logprobs=i == 5))
    requests[3] = replace(requests[3], constraint=Constraint("regex", "([a-d]{2} ){2,6}"))
    return requests


@pytest.fixture(scope="module")
def processing(engine_with: EngineStore) -> Iterator[Engine]:
    with shared_by_many():
        engine_with(**SPECULATES)
    with engine_with.held(**SPECULATES) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(processing: Engine) -> Outcomes:
    return run_alone(processing.runner, processing.card, asking(), way=PLAIN)


def reference(logits: np.ndarray, ids: list[int], arguments: dict[str, float]) -> np.ndarray:
    """Log-probs after the processors, in float64; where words are banned minus infinity."""
    logits = logits.astype(np.float64)
    if sigmas := arguments.get("top_n_sigma"):
        logits = np.where(logits >= logits.max() - sigmas * logits.std(), logits, -np.inf)
    if size := int(arguments.get("no_repeat_ngram", 0)):
        recent = ids[-64:]
        for end in range(size - 1, len(recent)):
            if recent[end - size + 1 : end] == recent[len(recent) - size + 1 :]:
                logits[recent[end]] = -np.inf
    return logits - np.logaddexp.reduce(logits)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", PROCESSED)
def test_tokens_are_drawn_from_what_the_processors_leave(processing: Engine, arguments: tuple):
    logits_of = prompt_logits_of(processing.runner, longest=112)
    prompt = [*draw_prompt(np.random.default_rng(8), 12).tolist()] * 2
    params = {"max_new_tokens": 12, "temperature": 1.0, "custom_params": dict(arguments), "ignore_eos": True}
    answer = processing.generate(input_ids=prompt, sampling_params=params, return_logprob=True, seed=4)
    assert isinstance(answer, dict)
    text = prompt + answer["output_ids"]
    logits = logits_of(text[:-1])
    for place, (logprob, token_id, _) in enumerate(answer["meta_info"]["output_token_logprobs"]):
        known = len(prompt) + place
        expected = reference(logits[known - 1], text[:known], dict(arguments))
        assert np.isfinite(expected[token_id])
        assert logprob == pytest.approx(expected[token_id], abs=LOGPROB_TOLERANCE)
    params["custom_params"] = None
    plain = processing.generate(input_ids=prompt, sampling_params=params, return_logprob=True, seed=4)
    assert isinstance(plain, dict)
    first, other = (each["meta_info"]["output_token_logprobs"][0] for each in (plain, answer))
    assert first[1] != other[1] or first[0] < other[0], "words were left out"


@pytest.mark.natively
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_they_do_not_depend_on_scheduling(processing: Engine, alone: Outcomes, way: Way):
    plain = [
        replace(each, request_id=f"{each.request_id}-", sampling=replace(each.sampling, processor_arguments=()))
        for each in asking()
    ]
    expected = alone | run_alone(processing.runner, processing.card, plain, way=PLAIN)
    assert_all_same(run_together(processing.runner, processing.card, [*asking(), *plain], way=way), expected)


@pytest.mark.slow
def test_a_vocabulary_in_parts_is_processed_as_a_whole_one(two_ranks: Engine, alone: Outcomes):
    way = replace(ON_TWO_RANKS, constraints=compiler())
    assert_all_same(run_together(two_ranks.runner, two_ranks.card, asking(), way=way), alone)


@pytest.mark.natively
def test_a_row_that_would_be_left_without_words_is_as_it_was(processing: Engine):
    """All words that are allowed would repeat: the others may not take their place."""
    params = {"max_new_tokens": 6, "temperature": 0, "logit_bias": {"7": 50}, "ignore_eos": True}
    told = {**params, "custom_params": {"no_repeat_ngram": 1}, "regex": "(aa)+"}
    answer = processing.generate(input_ids=[*range(40, 60)], sampling_params=told)
    assert isinstance(answer, dict) and set(answer["text"]) <= {"a"} and answer["meta_info"]["finish_reason"]


@pytest.mark.natively
def test_a_stream_is_processed_too(processing: Engine):
    params = {"max_new_tokens": 8, "temperature": 1, "custom_params": {"top_n_sigma": 1}}
    whole = processing.generate(input_ids=[5, 6, 7], sampling_params=params, seed=2)
    *_, last = processing.generate_stream(input_ids=[5, 6, 7], sampling_params={**params, "sampling_seed": 2})
    assert isinstance(whole, dict) and whole["output_ids"] == last["output_ids"]


@pytest.mark.natively
@pytest.mark.parametrize(
    "given",
    [
        {"unknown": 1},
        {"top_n_sigma": "1"},
        {"no_repeat_ngram": 1.5},
        {"no_repeat_ngram": 2**31},
        {"top_n_sigma": [1, 2]},
    ],
)
def test_arguments_that_no_processor_takes_are_refused(processing: Engine, given: dict[str, Any]):
    with pytest.raises(RequestError) as refused:
        processing.generate(input_ids=[5], sampling_params={"custom_params": given})
    assert refused.value.param in ("vllm_xargs", "custom_params")


def test_without_processors_every_argument_is_refused(engine: Engine):
    with pytest.raises(RequestError, match="has none"):
        engine.generate(input_ids=[5], sampling_params={"custom_params": {"top_n_sigma": 1}})


def test_log_softmax_of_the_reference_is_plain_without_arguments():
    logits = np.random.default_rng(0).normal(size=40)
    np.testing.assert_allclose(reference(logits, [1], {}), log_softmax(logits[None])[0], rtol=0, atol=1e-6)
