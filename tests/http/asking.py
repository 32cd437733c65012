"""Asking a server over HTTP, and reading what it answers."""

from __future__ import annotations

import json
import time

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TOKENS = "/inference/v1/generate"
MODEL = "tiny"


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


def wait_until(condition, within_s=600.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def prompt_fields(path, prompt_ids, *, max_tokens, **sampling):
    """The body of a greedy request for one prompt of ids, in the names of the route; chat has no ids."""
    sampling = {"temperature": 0, "ignore_eos": True, **sampling}
    if path == COMPLETIONS:
        return {"prompt": prompt_ids, "max_tokens": max_tokens, **sampling}
    if path == GENERATE:
        return {"input_ids": prompt_ids, "sampling_params": {"max_new_tokens": max_tokens, **sampling}}
    return {"token_ids": prompt_ids, "sampling_params": {"max_tokens": max_tokens, **sampling}}
