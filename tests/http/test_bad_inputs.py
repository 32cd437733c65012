"""Every bad input is refused with an error object that repeats nothing of it, and the server goes on."""

from __future__ import annotations

import pytest

from tests.http.bad_inputs import BAD_INPUTS, CHAT, COMPLETIONS, GENERATE, MARKER
from tests.http.conftest import POISONED_TOKEN_ID

GOOD = {"model": "tiny", "prompt": [5], "max_tokens": 1}
ROUTING = {"return_routed_experts": True}
NATIVE_ROUTING = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}, **ROUTING}


def check_error(answer, status):
    assert answer.status_code == status, answer.text
    assert MARKER not in answer.text
    is_anthropic = answer.request.url.path.startswith("/v1/messages")
    assert list(answer.json()) == (["type", "error"] if is_anthropic else ["error"])
    assert answer.json().get("type", "error") == "error"
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    return error


def post(http, path, body):
    return http.post(path, content=body) if isinstance(body, bytes) else http.post(path, json=body)


@pytest.mark.parametrize(("name", "path", "body", "status", "param"), BAD_INPUTS, ids=[row[0] for row in BAD_INPUTS])
def test_it_is_refused(http, name, path, body, status, param):
    error = check_error(post(http, path, body), status)
    if param is not None:
        assert error["param"] == param, error
        assert status == 404 or param in error["message"] or "tokens" in error["message"], error
    assert http.post(COMPLETIONS, json=GOOD).status_code == 200


@pytest.mark.parametrize("field", ["stream"])
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, GOOD | {"max_tokens": 600}), (GENERATE, {"input_ids": [999]})]
)
def test_a_bad_stream_is_refused_before_it_starts(http, path, body, field):
    check_error(http.post(path, json={**body, field: True}), 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [5], **ROUTING}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **ROUTING}),
        (GENERATE, NATIVE_ROUTING),
        (GENERATE, {**NATIVE_ROUTING, "stream": True}),
    ],
)
def test_routing_without_the_server_flag_names_the_flag(small_http, path, body):
    error = check_error(small_http.post(path, json=body), 400)
    assert "enable_return_routed_experts" in error["message"] and error["param"] == "return_routed_experts"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [5, *[POISONED_TOKEN_ID] * 300], "max_tokens": 4, "temperature": 0}),
        (GENERATE, {"input_ids": [POISONED_TOKEN_ID] * 300, "sampling_params": {"max_new_tokens": 4}}),
    ],
)
def test_logits_that_are_not_numbers_fail_one_request(small_http, path, body):
    """The good requests afterwards run through every page of the pool, those that held NaN among them."""
    good = {"prompt": [5, 6], "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    before = small_http.post(COMPLETIONS, json=good).json()["choices"]
    assert check_error(small_http.post(path, json=body), 422)["type"] == "model_error"
    streamed = small_http.post(path, json={**body, "stream": True}).text.split("\n\n")
    assert '"type":"model_error"' in streamed[-3] and streamed[-2:] == ["data: [DONE]", ""]
    for _ in range(9):
        assert small_http.post(COMPLETIONS, json=good).json()["choices"] == before


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-40, 1e-320])
def test_a_temperature_close_to_zero_is_close_to_greedy(http, temperature):
    answers = [
        http.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 4, "temperature": value, "logprobs": 0})
        for value in (0, temperature)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert answers[0].json()["choices"][0]["text"] == answers[1].json()["choices"][0]["text"]


@pytest.mark.parametrize("fields", [{"top_p": 1e-30}, {"top_k": 2**31 - 1}, {"min_p": 1}, {"temperature": 2}])
def test_the_edges_of_the_ranges_are_served(http, fields):
    answer = http.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 4, "temperature": 1, "seed": 0, **fields})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 1
