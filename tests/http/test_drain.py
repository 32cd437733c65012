"""A server that drains: new work is refused with a time to come back, what runs is completed, control goes on."""

from __future__ import annotations

import threading

import anyio.to_thread
import httpx
import pytest

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.serving.dialects import DIALECTS, Prompt
from tests.support.serving.http_client import GENERATE, wait_until
from tests.support.serving.http_server import running

PROMPT = Prompt("x", [5, 6])


@pytest.fixture
def state(engine):
    return ApiState(engine.loop, engine.tokenizer, ServerSettings())


@pytest.fixture
def client(state):
    with running(create_api(state)) as url, httpx.Client(base_url=url, timeout=600) as client:
        yield client


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_new_work_is_refused_with_a_time_to_come_back(client, state, dialect):
    state.traffic.drain()
    answer = client.post(dialect.path, json=dialect.body(PROMPT, max_tokens=1))
    assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
    assert answer.json()["error"]["code"] == "draining"
    health = client.get("/health")
    assert health.status_code == 503 and "Retry-After" in health.headers
    assert client.get("/v1/loads").status_code == client.get("/metrics").status_code == 200
    assert client.post("/abort_request", json={"abort_all": True}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_is_counted_until_its_last_byte_and_completed(client, state, stream):
    assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    sampling = {"max_new_tokens": 20, "ignore_eos": True}
    body = {"input_ids": [5, 6], "sampling_params": sampling, "stream": stream}
    found = []
    asking = threading.Thread(target=lambda: found.append(client.post(GENERATE, json=body)))
    asking.start()
    wait_until(lambda: state.traffic.num_open == 1 and not state.loop.is_idle)
    state.traffic.drain()
    assert client.post("/continue_generation").status_code == 200
    asking.join()
    assert found[0].status_code == 200
    assert '"type":"length"' in found[0].text
    wait_until(lambda: state.traffic.num_open == 0)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_no_request_waits_for_a_thread_of_the_framework(client, monkeypatch, dialect):
    """FastAPI calls what is no coroutine function on one of a few threads, which takes longer than the call."""

    async def refused(function: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{function} is called on a thread")

    monkeypatch.setattr(anyio.to_thread, "run_sync", refused)
    assert client.post(dialect.path, json=dialect.body(PROMPT, max_tokens=1)).status_code == 200
