"""Sessions of requests: named in headers or bodies of every dialect, separate by API key and salt, without effect."""

from __future__ import annotations

import itertools

import httpx
import pytest

from rayserve_moe.serving.session_identity import FIELDS, HEADERS, named_in_body, record_name, session_key, session_name
from tests.http.conftest import served
from tests.http.test_tinker import ORDER
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, TOKENS

GREEDY = {"max_tokens": 3, "temperature": 0}
BODIES = {
    COMPLETIONS: {"prompt": [5, 6], **GREEDY},
    CHAT: {"messages": [{"role": "user", "content": "x"}], **GREEDY},
    MESSAGES: {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **GREEDY},
    RESPONSES: {"input": "x", "max_output_tokens": 16, "temperature": 0},
    TOKENS: {"token_ids": [5, 6], "sampling_params": GREEDY},
    GENERATE: {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "temperature": 0}},
}
HINTS = {"cache_control": {"type": "ephemeral"}, "prompt_cache_retention": "24h"}
VARYING = {"id", "created", "created_at", "completed_at", "request_id", "meta_info", "usage"}


@pytest.fixture
def sessions(engine, monkeypatch):
    """Sessions of the requests that the engine gets, in order."""
    seen, submit = [], engine.loop.submit

    def recording(request, *args, **kwargs):
        seen.append(request.session)
        return submit(request, *args, **kwargs)

    monkeypatch.setattr(engine.loop, "submit", recording)
    return seen


def nested(path, value):
    for name in reversed(path):
        value = {name: value}
    return value


def scope_of(headers=(), fields=None):
    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers]}
    record_name(scope, named_in_body(fields or {}))
    return scope


def lasting(answer):
    """Return the parts of an answer that must not depend on a session."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return {name: value for name, value in body.items() if name not in VARYING and name != "output"} | {
        "output": [{**item, "id": ""} for item in body.get("output", [])]
    }


def test_headers_come_before_bodies_and_each_before_the_next():
    everything = dict.fromkeys(HEADERS)
    for name in HEADERS:
        everything[name] = f"header {name}"
    fields = {}
    for number, path in enumerate(reversed(FIELDS)):
        fields |= nested(path, f"field {number}")
    for given in range(len(HEADERS)):
        assert session_name(scope_of([*everything.items()][given:], fields)) == f"header {HEADERS[given]}"
    for given in range(len(FIELDS)):
        left = {path[0]: fields[path[0]] for path in FIELDS[given:]}
        assert session_name(scope_of((), left)) == f"field {len(FIELDS) - 1 - given}"
    assert session_name(scope_of((), {"user": "p", "safety_identifier": "p"})) == ""


@pytest.mark.parametrize("value", [None, "", 5, True, ["a"], {"session_id": "a"}])
def test_what_is_no_name_is_skipped(value):
    assert named_in_body({"session_id": value, "prompt_cache_key": "next"}) == "next"
    named = "a" if isinstance(value, dict) else ""
    assert named_in_body({"agent_hint": value}) == named_in_body({"nvext": {"agent_context": value}}) == named


def test_keys_and_salts_part_sessions_and_no_text_imitates_another():
    callers = [[], [("authorization", "Bearer a")], [("authorization", "Bearer ab")], [("x-api-key", "c")]]
    keys = [
        session_key(name, scope=scope_of(caller), cache_salt=salt)
        for caller, salt, name in itertools.product(callers, ("", "a", "b"), ("a", "b", "1:a1:b", "x" * 100_000))
    ]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {32}
    assert session_key("", scope=scope_of(), cache_salt="a") is None
    assert session_key("\ud800", scope=scope_of(), cache_salt="")


def test_a_header_names_the_session_of_a_body_in_any_script():
    assert session_name(scope_of([("x-session-id", "zür-会")])) == "zür-会"
    assert session_name({"type": "http", "headers": [(b"x-session-id", b"caf\xe9")]}) == "café"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", BODIES)
def test_every_dialect_names_a_session_and_answers_as_without(engine, sessions, path):
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        plain = http.post(path, json=BODIES[path])
        by_body = http.post(path, json={**BODIES[path], **HINTS, "session_id": "s"})
        by_argument = http.post(path, json={**BODIES[path], "vllm_xargs": {"session_id": "s"}})
        by_header = http.post(path, json={**BODIES[path], "session_id": "other"}, headers={"X-Session-Id": "s"})
        salted = http.post(path, json={**BODIES[path], "session_id": "s", "cache_salt": "t"})
    none, first, *same, other = sessions
    assert none is None and same == [first, first] and other != first and first and other
    assert lasting(plain) == lasting(by_body) == lasting(by_argument) == lasting(by_header) == lasting(salted)
    assert "x-ignored-fields" not in by_body.headers


def test_a_header_of_the_settings_comes_first(engine, sessions):
    headers = {"x-own": "s", "x-session-id": "other"}
    with served(engine, session_headers=("X-Own",)) as url:
        httpx.post(url + COMPLETIONS, json=BODIES[COMPLETIONS], headers=headers, timeout=60).raise_for_status()
        body = {**BODIES[COMPLETIONS], "prompt_cache_key": "s"}
        httpx.post(url + COMPLETIONS, json=body, timeout=60).raise_for_status()
    assert sessions[0] == sessions[1]


def test_each_prompt_of_a_batch_has_the_session_under_its_own_salt(engine, sessions):
    body = {"input_ids": [[5], [6], [7]], "cache_salt": ["a", "a", "b"], "session_id": "s"}
    with served(engine) as url:
        httpx.post(url + GENERATE, json={**body, "sampling_params": {"max_new_tokens": 1}}, timeout=60)
    assert sessions[0] == sessions[1] != sessions[2]


def test_an_order_of_tinker_is_a_session_of_its_own(engine, sessions):
    with served(engine) as url, httpx.Client(base_url=f"{url}/api/v1", timeout=60) as http:
        for number in (1, 2, 2):
            http.post("/asample", json={**ORDER, "seq_id": number}).raise_for_status()
    assert len(sessions) == 2 and None not in sessions and len(set(sessions)) == 2
