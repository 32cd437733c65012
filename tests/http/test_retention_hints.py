"""Hints about cached pages: read in every dialect, refused where they cannot be read, and without effect on answers."""

from __future__ import annotations

import itertools

import httpx
import pytest

from rayserve_moe.engine import page_watch
from rayserve_moe.requests.fields import INT32_MAX
from rayserve_moe.requests.retention import NO_RETENTION, Retention
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.retention_hints import retention_in_body
from tests.http.conftest import served
from tests.http.test_session_identity import BODIES, lasting
from tests.support.serving.http_client import COMPLETIONS, MESSAGES, RESPONSES

EVERYTHING, YEAR_S = INT32_MAX, 31_536_000.0
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def config(**fields):
    return {"kv_cache_retention_config": fields}


def token_range(end, priority, **fields):
    return {"token_start": 0, "token_end": end, "priority": priority, **fields}


@pytest.mark.parametrize(
    ("fields", "protected"),
    [
        ({"cache_control": SHORT}, ((EVERYTHING, 300.0),)),
        ({"nvext": {"cache_control": LONG}}, ((EVERYTHING, 3600.0),)),
        ({"agent_hint": {"cache_control": {"type": "ephemeral", "ttl": 60}}}, ((EVERYTHING, 60.0),)),
        ({"system": [{"type": "text", "text": "x", "cache_control": LONG}], "tools": [{"cache_control": SHORT}]},
         ((EVERYTHING, 3600.0),)),
        ({"messages": ["x", {"content": "x"}, {"content": [{"text": "x"}, {"cache_control": SHORT}]}]},
         ((EVERYTHING, 300.0),)),
        ({"prompt_cache_retention": "24h"}, ((EVERYTHING, 86_400.0),)),
        ({"prompt_cache_retention": "in_memory"}, ()),
        ({"prompt_cache_retention": "24h", "cache_control": SHORT}, ((EVERYTHING, 86_400.0),)),
        (config(token_range_retention_configs=[token_range(64, 80, duration_ms=1500), token_range(None, 35)]),
         ((64, 1.5),)),
        (config(token_range_retention_configs=[token_range(8, 100)], decode_retention_priority=90,
                decode_duration_ms=2000), ((8, YEAR_S), (EVERYTHING, 2.0))),
        (config(decode_retention_priority=0), ()),
        ({"metadata": {"cache_control": SHORT}, "system": "x", "messages": None}, ()),
    ],
)  # fmt: skip
def test_hints_of_all_dialects_become_one_record(fields, protected):
    assert retention_in_body(fields) == Retention(protected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"cache_control": {"ttl": ttl}}, "cache_control")
          for ttl in ("", "1d", "h", "-5m", "9999999999h", "9000h", -1, True, float("nan"), float("inf"), 4e7, [])),
        ({"cache_control": "ephemeral"}, "cache_control"),
        *(({"prompt_cache_retention": kept}, "prompt_cache_retention") for kept in ("1h", 24, ["24h"], "", False)),
        *((config(token_range_retention_configs=ranges), "kv_cache_retention_config")
          for ranges in ([5], 5, [token_range(-1, 50)], [token_range(1 << 40, 50)], [token_range(5, 101)],
                         [token_range(5, 50, duration_ms=-1)], [token_range(5, 50, duration_ms=4e10)],
                         [token_range(5, 50)] * 17)),
        ({"kv_cache_retention_config": [1]}, "kv_cache_retention_config"),
        (config(decode_retention_priority="high"), "kv_cache_retention_config"),
    ],
)  # fmt: skip
def test_hints_that_cannot_be_read_are_refused_by_name(fields, param):
    with pytest.raises(ApiError, match=param) as caught:
        retention_in_body(fields)
    assert caught.value.status == 400 and caught.value.param == param and len(caught.value.message) < 300


@pytest.fixture
def submitted(engine, monkeypatch):
    """Requests that the engine gets, in order."""
    seen, submit = [], engine.loop.submit

    def recording(request, *args, **kwargs):
        seen.append(request)
        return submit(request, *args, **kwargs)

    monkeypatch.setattr(engine.loop, "submit", recording)
    return seen


@pytest.mark.parametrize("path", BODIES)
def test_every_dialect_carries_hints_and_answers_as_without(engine, submitted, path):
    given = {"kv_cache_retention_config": {"decode_retention_priority": 100}, "session_id": "s"}
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        plain = http.post(path, json=BODIES[path])
        hinted = http.post(path, json={**BODIES[path], **given}, headers={"X-Dynamo-Session-Final": "true"})
        open_ended = http.post(path, json={**BODIES[path], **given}, headers={"X-Dynamo-Session-Final": "false"})
        refused = http.post(path, json={**BODIES[path], "kv_cache_retention_config": 5})
    protected = ((EVERYTHING, YEAR_S),)
    expected = [NO_RETENTION, Retention(protected, ends_session=True), Retention(protected)]
    assert [request.retention for request in submitted] == expected
    assert lasting(plain) == lasting(hinted) == lasting(open_ended)
    assert "x-ignored-fields" not in hinted.headers
    assert refused.status_code == 400 and "kv_cache_retention_config" in refused.text


def test_hints_of_anthropic_and_openai_are_read_where_their_clients_send_them(engine, submitted):
    parts = [{"type": "text", "text": "x", "cache_control": LONG}]
    bodies = {
        MESSAGES: {**BODIES[MESSAGES], "messages": [{"role": "user", "content": parts}]},
        RESPONSES: {**BODIES[RESPONSES], "prompt_cache_retention": "24h"},
    }
    with served(engine) as url:
        for path, body in bodies.items():
            httpx.post(url + path, json=body, timeout=60).raise_for_status()
    assert [request.retention.protected[0][1] for request in submitted] == [3600.0, 86_400.0]


@pytest.mark.parametrize("path", ["/finish_session", "/close_session"])
def test_a_session_is_finished_by_its_own_key_and_salt_alone(engine, monkeypatch, submitted, path):
    finished = []
    monkeypatch.setattr(page_watch, "finish_session", lambda _, session: finished.append(session))
    callers = ({}, {"Authorization": "Bearer other"})
    salts = ("", "salt")
    with served(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        for headers, salt in itertools.product(callers, salts):
            named = {"session_id": "s", "cache_salt": salt}
            http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], **named}, headers=headers).raise_for_status()
            http.post(path, json=named, headers=headers).raise_for_status()
        http.post(f"{path}?session_id=s").raise_for_status()
        assert http.post(path).status_code == http.post(path, json={"session_id": ""}).status_code == 400
        assert http.post(path, json={"session_id": "x" * 5000}).status_code == 400
    assert finished == [*(request.session for request in submitted), finished[0]]
    assert len(set(finished)) == len(callers) * len(salts)
