"""`/inference/v1/generate`: what a client that hard-codes vLLM's dialect relies on."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from rayserve_moe.rollouts.alignment import decode_answer
from tests.http.asking import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, stream
from tests.http.test_bad_inputs import check_error

PROMPT = [*range(20, 40)]
SAMPLING = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def layout(engine):
    return engine.loop.card.routing


def test_the_answer_has_the_bytes_that_clients_search_for(http, layout):
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": {**SAMPLING, "logprobs": 1}, "cache_salt": "v7"}
    answer = http.post(TOKENS, json=body)
    start = answer.content.index(b'"routed_experts":{"data":"') + len(b'"routed_experts":{"data":"')
    data = answer.content[start : answer.content.index(b'"', start)]
    (choice,) = answer.json()["choices"]
    routed = choice["routed_experts"]
    assert list(routed) == ["data", "shape", "start", "dtype"]
    assert routed["shape"] == [len(PROMPT) + 5 - 1, layout.num_hidden_layers, layout.top_k]
    assert (routed["start"], routed["dtype"]) == (0, "uint8")
    ids = np.frombuffer(base64.b64decode(data, validate=True), np.uint8).reshape(routed["shape"])
    np.testing.assert_array_equal(ids[:, list(layout.layer_ids)], decode_answer(answer.json(), layout).rows)
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 5
    assert answer.json()["usage"]["completion_tokens"] == 5 and answer.json()["request_id"]


def test_it_answers_what_the_native_route_answers(http, layout):
    native = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True, "n": 2}
    theirs = ask(http, GENERATE, input_ids=PROMPT, sampling_params=native, return_routed_experts=True)
    ours = ask(http, TOKENS, token_ids=PROMPT, sampling_params={**SAMPLING, "n": 2})
    for index, answer in enumerate(theirs):
        assert ours["choices"][index]["token_ids"] == answer["output_ids"]
        np.testing.assert_array_equal(
            decode_answer(ours, layout, choice=index).rows, decode_answer(answer, layout).rows
        )


def test_routing_can_be_switched_off_and_widened(http, layout):
    off = ask(http, TOKENS, token_ids=PROMPT, sampling_params=SAMPLING, return_routed_experts=False)
    assert "routed_experts" not in off["choices"][0] and "routed_experts_info" not in off["choices"][0]
    wide = ask(http, TOKENS, token_ids=PROMPT, sampling_params=SAMPLING, routed_experts_dtype="int16")
    assert wide["choices"][0]["routed_experts"]["dtype"] == "int16"
    plain = ask(http, TOKENS, token_ids=PROMPT, sampling_params=SAMPLING)
    np.testing.assert_array_equal(decode_answer(wide, layout).rows, decode_answer(plain, layout).rows)


def test_a_server_that_captures_nothing_answers_without_routing(small_http):
    answer = ask(small_http, TOKENS, token_ids=[5], sampling_params=SAMPLING)
    assert "routed_experts" not in answer["choices"][0]
    for switch in ("return_routed_experts", "stream_routed_experts"):
        body = {"token_ids": [5], switch: True, "stream": True}
        assert "enable_return_routed_experts" in check_error(small_http.post(TOKENS, json=body), 400)["message"]


def test_a_stream_brings_new_tokens_and_adds_up(http):
    sampling = {**SAMPLING, "max_tokens": 30, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
    whole = ask(http, TOKENS, token_ids=PROMPT, sampling_params=sampling)
    events = stream(http, TOKENS, token_ids=PROMPT, sampling_params=sampling, stream_options={"include_usage": True})
    assert {event["request_id"] for event in events} == {events[0]["request_id"]}
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 60
    ids, tokens, ends = [[], []], [[], []], []
    for event in events[:-1]:
        (choice,) = event["choices"]
        ids[choice["index"]] += choice["token_ids"]
        tokens[choice["index"]] += [entry["token"] for entry in choice["logprobs"]["content"]]
        if choice["finish_reason"]:
            ends.append(choice["index"])
            assert len(event["prompt_logprobs"]) == len(PROMPT)
    assert ids == [choice["token_ids"] for choice in whole["choices"]] and sorted(ends) == [0, 1]
    assert tokens == [[entry["token"] for entry in choice["logprobs"]["content"]] for choice in whole["choices"]]


@pytest.mark.parametrize("path", [TOKENS, COMPLETIONS, CHAT])
@pytest.mark.parametrize("continuous", [False, True])
def test_every_event_counts_tokens_where_that_is_asked_for(http, path, continuous):
    body = {
        TOKENS: {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "n": 2}},
        COMPLETIONS: {"prompt": PROMPT, "n": 2, **SAMPLING},
        CHAT: {"messages": [{"role": "user", "content": "x"}], "n": 2, **SAMPLING},
    }[path]
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *events, last = stream(http, path, **body, stream_options=options)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10
    if not continuous:
        assert all(event.get("usage") is None for event in events)
        return
    counted = {}
    for event in events:
        (choice,) = event["choices"]
        usage, before = event["usage"], counted.get(choice["index"], 0)
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["completion_tokens"] >= before
        counted[choice["index"]] = usage["completion_tokens"]
    assert counted == {0: 5, 1: 5}


def test_a_stop_id_ends_the_tokens(http):
    first = ask(http, TOKENS, token_ids=PROMPT, sampling_params=SAMPLING)["choices"][0]["token_ids"][2]
    sampling = {**SAMPLING, "stop_token_ids": [first], "skip_special_tokens": False}
    (choice,) = ask(http, TOKENS, token_ids=PROMPT, sampling_params=sampling)["choices"]
    assert choice["finish_reason"] == "stop" and choice["token_ids"][-1] == first


def test_only_requests_of_one_salt_share_prefixes(http):
    def cached(salt):
        answer = ask(http, TOKENS, token_ids=[*range(200, 240)], sampling_params=SAMPLING, cache_salt=salt)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("two"), cached("one")] == [0, 0, 32]


def test_two_requests_of_one_id_cannot_run(http, unhurried):
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 400}, "request_id": "mine"}
    with http.stream("POST", TOKENS, json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert check_error(http.post(TOKENS, json=body), 400)["param"] == "request_id"
