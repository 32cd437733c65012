"""A pod that stops waits for the requests of its cluster, and for nothing else."""

from __future__ import annotations

import importlib.util
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.deploy.manifests import ROOT
from tests.http.conftest import assert_idle, served

SPEC = importlib.util.spec_from_file_location("wait_until_idle", ROOT / "deploy" / "wait_until_idle.py")
waiting = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(waiting)


class Clock:
    """Time that passes by sleeping alone, so that no bound depends on the machine; `events` come at their seconds."""

    def __init__(self):
        self.now_s, self.events = 0.0, {}

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        assert self.now_s < 1000, "the wait does not end"
        if event := self.events.get(self.now_s):
            event()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


@pytest.fixture
def seconds(clock):
    """How long the wait for a server is, on the clock."""

    def wait(url, api_key="", **limits):
        started = clock.now_s
        waiting.wait_until_idle(url, api_key, **limits)
        return clock.now_s - started

    return wait


@pytest.fixture
def end_answer(engine, monkeypatch):
    """An answer under way, which takes no step until this is called; that returns once it has ended."""
    run, begun, released = engine.loop._cycle.run, threading.Event(), threading.Event()

    def run_later():
        begun.set()
        assert released.wait(600)
        return run()

    def end():
        released.set()
        thread.join()
        assert_idle(engine)

    monkeypatch.setattr(engine.loop._cycle, "run", run_later)
    asked = {"input_ids": [5, 6, 7], "max_new_tokens": 8, "ignore_eos": True, "temperature": 0}
    thread = threading.Thread(target=engine.generate, kwargs=asked)
    thread.start()
    assert begun.wait(600)
    yield end
    end()


@pytest.fixture
def proxy_alone():
    """What HAProxy answers without a replica; its status can be set."""

    class Answer(BaseHTTPRequestHandler):
        status = 503

        def do_GET(self):
            self.send_error(self.status)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Answer
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_left_once_it_has_been_idle_for_a_while(url, seconds):
    assert seconds(url, limit_s=60) == waiting.IDLE_S


def test_an_answer_under_way_is_waited_for(url, seconds, clock, end_answer):
    clock.events[50.0] = end_answer
    assert seconds(url, limit_s=600) == 49.5 + waiting.IDLE_S, "it was last seen half a second before it ended"


def test_the_limit_ends_the_wait(url, seconds, end_answer):
    assert seconds(url, limit_s=20) == 20
    assert waiting.requests_in(url, "") == 1


def test_the_key_is_sent_and_a_refused_one_ends_nothing(engine, seconds):
    with served(engine, api_key="open") as url:
        assert waiting.requests_in(url, "open") == 0
        assert waiting.requests_in(url, "wrong") == 1
        assert seconds(url, "wrong", limit_s=20, silent_s=2) == 20


def test_where_nobody_answers_nobody_is_waited_for(seconds):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        assert seconds(f"http://127.0.0.1:{probe.getsockname()[1]}", limit_s=600) == waiting.SILENT_S


@pytest.mark.parametrize(("status", "num_requests"), [(503, None), (404, None), (500, 1), (429, 1)])
def test_a_proxy_without_an_application_counts_as_silence_and_a_failure_does_not(proxy_alone, status, num_requests):
    url, answer = proxy_alone
    answer.status = status
    assert waiting.requests_in(url, "") == num_requests


def test_a_worker_asks_the_head(monkeypatch, url, clock):
    monkeypatch.delenv("FQ_RAY_IP", raising=False)
    assert waiting.head_url() == "http://127.0.0.1:8000"
    monkeypatch.setenv("FQ_RAY_IP", "qwen-head-svc.default.svc.cluster.local")
    assert waiting.head_url() == "http://qwen-head-svc.default.svc.cluster.local:8000"
    waiting.main(["--limit-s", "2", "--url", url])
    assert clock.now_s == 2
