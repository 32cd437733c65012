"""What surrounds an answer: clients that leave, the API key, the limit on bodies, overload, health."""

from __future__ import annotations

import json
import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest

from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.serving.middleware.edge_guard import ADMIN_PATHS
from tests.http.conftest import assert_idle, served
from tests.support.engine.shared_settings import ONE_ROW
from tests.support.serving.http_client import check_error
from tests.support.serving.http_server import KEY

LONG = {"prompt": [5, 6], "max_tokens": 500, "ignore_eos": True, "n": 16}
SHORT = {"prompt": [5], "max_tokens": 1}


def test_the_first_token_does_not_wait_for_the_rest(http, engine):
    with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert engine.loop.statistics()["requests_live"] == 1


def test_every_prompt_is_taken_back_when_one_cannot_be_served(http, engine):
    answer = http.post("/v1/completions", json={**LONG, "prompt": [[5]] * 5 + [[5] * 100]})
    assert check_error(answer, 400)["param"] == "max_tokens"
    assert_idle(engine)


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/completions", "prompt", {"max_tokens": 4}),
        ("/generate", "input_ids", {}),
    ],
)
def test_more_prompts_than_are_ever_taken_are_refused_for_good(small_http, small_engine, path, name, body):
    answer = small_http.post(path, json={name: [[5]] * 3, **body})
    assert "3 prompts" in check_error(answer, 400)["message"] and answer.json()["error"]["param"] == name
    assert_idle(small_engine)


def test_the_api_key_guards_everything_but_probes(engine):
    """A kubelet sends no key: it asks whether the process lives, and whether it takes requests."""
    with served(engine, api_key=KEY) as url, httpx.Client(base_url=url) as http:
        for path in ("/health", "/ready", "/liveness", "/ping"):
            assert http.get(path).json() == {"status": "ok"}, path
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": KEY},
            {"X-Api-Key": KEY},
        ):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")):
                answer = http.request(method, path, json=SHORT, headers=headers)
                assert check_error(answer, 401)["code"] == "invalid_api_key"
                assert KEY not in answer.text
        allowed = {"Authorization": f"Bearer {KEY}"}
        assert http.post("/v1/completions", json=SHORT, headers=allowed).status_code == 200
        assert http.get("/v1/models", headers={"Authorization": f"bearer  {KEY}"}).status_code == 200
    assert_idle(engine)


ADMIN_KEY = "the key of a trainer"
CONTROL = [("GET", "/flush_cache"), *(("POST", path) for path in sorted(ADMIN_PATHS))]
ORDINARY = {"/v1/completions", "/v1/chat/completions", "/generate", "/inference/v1/generate", "/abort_request"}
ORDINARY |= {"/skyrl/v1/generate", "/tokenize", "/detokenize", "/finish_session", "/ping", "/abort_requests"}
ORDINARY |= {"/inference/v1/abort_requests", "/v1/embeddings", "/classify", "/v1/chat/completions/render"}
ORDINARY |= {"/v1/score", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/{response_id}"}
ORDINARY |= {"/resume_request", "/audit", "/close_session"}
ORDINARY |= {f"/api/v1/{name}" for name in ("asample", "retrieve_future", "cancel_future", "telemetry")}
ORDINARY |= {f"/api/v1/{name}" for name in ("create_session", "create_sampling_session", "session_heartbeat")}
ORDINARY |= {f"/api/v1/{name}" for name in ("client/config", "client/dynamic_config", "sessions/{session_id}/finish")}
"""What a client's own key is good for, of what changes anything."""


def test_every_route_that_changes_something_is_guarded_by_one_of_the_keys(http):
    paths = http.get("/openapi.json").json()["paths"]
    changing = {path for path, methods in paths.items() if methods.keys() - {"get", "head"}}
    assert changing - ORDINARY <= ADMIN_PATHS <= set(paths)


@pytest.mark.parametrize("client_key", ["", KEY])
def test_the_admin_key_guards_what_concerns_all_clients(engine, client_key):
    """No other key does, and it is good for everything else too."""
    keys = {"api_key": client_key, "admin_api_key": ADMIN_KEY}
    with served(engine, **keys) as url, httpx.Client(base_url=url, timeout=60) as http:
        admin, client = {"Authorization": f"Bearer {ADMIN_KEY}"}, {"Authorization": f"Bearer {client_key or KEY}"}
        for headers in ({}, client, {"Authorization": ADMIN_KEY}):
            for method, path in CONTROL:
                answer = http.request(method, path, json={"model_path": "/x"}, headers=headers)
                assert check_error(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer" and ADMIN_KEY not in answer.text
        assert check_error(http.post("/abort_request", json={"abort_all": True}, headers=client), 401)
        assert http.post("/abort_request", json={"rid": "mine"}, headers=client).status_code == 200
        for headers in (client, admin):
            assert http.post("/v1/completions", json=SHORT, headers=headers).status_code == 200
        assert http.post("/v1/completions", json=SHORT).status_code == (401 if client_key else 200)
        for path, body in (("/pause_generation", {}), ("/continue_generation", {}), ("/flush_cache", {})):
            assert http.post(path, json=body, headers=admin).status_code == 200
        assert http.post("/abort_request", json={"abort_all": True}, headers=admin).status_code == 200
        refused = http.post("/update_weights_from_disk", json={"model_path": "/nowhere"}, headers=admin)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "weights_refused"
    assert_idle(engine)


def test_without_an_admin_key_the_other_one_is_enough(engine):
    with served(engine, api_key=KEY) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.post("/flush_cache").status_code == 401
        assert http.post("/flush_cache", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    assert_idle(engine)


def _chunks(size):
    for _ in range(size // 1000):
        yield b" " * 1000


@pytest.mark.parametrize("size", [5000, 60_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_refused(engine, size, is_chunked):
    with served(engine, max_body_bytes=4000) as url, httpx.Client(base_url=url) as http:
        content = _chunks(size) if is_chunked else b" " * size
        answer = http.post("/v1/completions", content=content)
        assert check_error(answer, 413)["code"] == "body_too_large"
        fits = json.dumps(SHORT).encode().ljust(4000)
        assert http.post("/v1/completions", content=fits).status_code == 200
    assert_idle(engine)


def test_a_length_header_alone_is_enough_to_refuse(url):
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=600) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        status = connection.makefile("rb").readline()
    assert status.split()[1] in (b"400", b"413") or status == b""


def test_a_stopped_engine_is_unhealthy_and_says_so(checkpoint):
    engine = Engine(model_path=str(checkpoint), **ONE_ROW)
    with served(engine) as url, httpx.Client(base_url=url, timeout=600) as http:
        assert http.get("/health").json() == {"status": "ok"}
        streamed: list[str] = []
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            stopping = threading.Thread(target=engine.shutdown)
            stopping.start()
            streamed.extend(line for line in lines if line)
            stopping.join()
        assert streamed[-1] == "data: [DONE]"
        assert json.loads(streamed[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        for answer in (http.get("/health"), http.post("/v1/completions", json=SHORT)):
            assert check_error(answer, 503)["code"] == "engine_stopped"
            assert int(answer.headers["retry-after"]) >= 1
