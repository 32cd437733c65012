"""Every bad input is refused with an error object that repeats nothing of it, and the server goes on."""

from __future__ import annotations

import pytest

from tests.http.bad_inputs import BAD_INPUTS
from tests.support.serving.http_client import COMPLETIONS, check_error

GOOD = {"model": "tiny", "prompt": [5], "max_tokens": 1}


def post(http, path, body):
    return http.post(path, content=body) if isinstance(body, bytes) else http.post(path, json=body)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "path", "body", "status", "param"), BAD_INPUTS, ids=[row[0] for row in BAD_INPUTS])
def test_it_is_refused(http, name, path, body, status, param):
    error = check_error(post(http, path, body), status)
    if param is not None:
        assert error["param"] == param, error
        assert status == 404 or param in error["message"] or "tokens" in error["message"], error
    assert http.post(COMPLETIONS, json=GOOD).status_code == 200


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
