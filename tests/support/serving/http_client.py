"""Requests to a server over HTTP, their answers, streams and errors."""

from __future__ import annotations

import json
import time

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TOKENS = "/inference/v1/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
MODEL = "tiny"
MARKER = "zq7-marker"
"""Put into inputs; no answer may repeat it."""


def ask(http, path, **body):
    """Post a body that is all right; returns the answer."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scored(http, input_ids, start=0, **fields):
    """Score a prompt from a position on, generating nothing; returns the answer."""
    asked = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": start}
    return ask(http, GENERATE, input_ids=input_ids, **asked, **fields)


def stream(http, path, **body):
    """Post a body with `stream`; returns the events."""
    return list(events_of(http, path, **body))


def events_of(http, path, **body):
    """Post a body with `stream`; yields each event as it comes."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        is_done = False
        for line in filter(None, answer.iter_lines()):
            assert not is_done, "something follows the end"
            is_done = line == "data: [DONE]"
            if not is_done:
                yield json.loads(line.removeprefix("data: "))
    assert is_done


def check_error(answer, status):
    """Check that an answer is an error in the form of its dialect; returns the error."""
    assert answer.status_code == status, answer.text
    assert MARKER not in answer.text
    is_anthropic = answer.request.url.path.startswith("/v1/messages")
    assert list(answer.json()) == (["type", "error"] if is_anthropic else ["error"])
    assert answer.json().get("type", "error") == "error"
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    return error


def wait_until(condition, within_s=600.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
