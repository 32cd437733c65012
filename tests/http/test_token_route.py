"""`/inference/v1/generate`: what a client that hard-codes vLLM's dialect relies on."""

from __future__ import annotations

import base64

import numpy as np

from rayserve_moe.rollouts.alignment import decode_answer
from tests.support.serving.http_client import TOKENS, ask, check_error, stream

PROMPT = [*range(20, 40)]
SAMPLING = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}


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


def test_events_name_their_request_and_score_the_prompt_at_each_end(http):
    sampling = {**SAMPLING, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
    events = stream(http, TOKENS, token_ids=PROMPT, sampling_params=sampling)
    assert len({event["request_id"] for event in events}) == 1
    ends = [event for event in events if event["choices"][0]["finish_reason"]]
    assert [len(event["prompt_logprobs"]) for event in ends] == [len(PROMPT)] * 2
    for (choice,) in (event["choices"] for event in events):
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
