"""A pod that stops waits for the requests of its cluster, and for nothing else."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.deploy.manifests import ROOT
from tests.http.conftest import served

SPEC = importlib.util.spec_from_file_location("wait_until_idle", ROOT / "deploy" / "wait_until_idle.py")
waiting = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(waiting)


def seconds(url, *, limit_s, api_key="", silent_s=30.0):
    start = time.monotonic()
    waiting.wait_until_idle(url, api_key, limit_s=limit_s, idle_s=0.3, silent_s=silent_s)
    return time.monotonic() - start


@pytest.fixture
def answering(engine, monkeypatch):
    """A long answer under way; yields when it ended, as a list that is empty until then."""
    run, ended, begun = engine.loop._cycle.run, [], threading.Event()

    def run_later():
        time.sleep(0.005)
        begun.set()
        return run()

    def generate():
        engine.generate(input_ids=[5, 6, 7], max_new_tokens=250, ignore_eos=True, temperature=0)
        ended.append(time.monotonic())

    monkeypatch.setattr(engine.loop._cycle, "run", run_later)
    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(30)
    yield ended
    thread.join()


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


def test_an_idle_server_is_left_at_once(url):
    assert 0.3 <= seconds(url, limit_s=60) < 20


def test_an_answer_under_way_is_waited_for(url, answering):
    waiting.wait_until_idle(url, "", limit_s=120, idle_s=0.3, silent_s=30)
    assert answering and time.monotonic() - answering[0] >= 0.2


def test_the_limit_ends_the_wait(url, answering):
    assert 0.5 <= seconds(url, limit_s=0.5) < 5
    assert not answering


def test_the_key_is_sent_and_a_refused_one_ends_nothing(engine):
    with served(engine, api_key="open") as url:
        assert waiting.requests_in(url, "open") == 0
        assert waiting.requests_in(url, "wrong") == 1
        assert seconds(url, limit_s=1, api_key="wrong", silent_s=0.2) >= 1


def test_where_nobody_answers_nobody_is_waited_for():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        assert 0.5 <= seconds(url, limit_s=60, silent_s=0.5) < 20


@pytest.mark.parametrize(("status", "num_requests"), [(503, None), (404, None), (500, 1), (429, 1)])
def test_a_proxy_without_an_application_counts_as_silence_and_a_failure_does_not(proxy_alone, status, num_requests):
    url, answer = proxy_alone
    answer.status = status
    assert waiting.requests_in(url, "") == num_requests


def test_a_worker_asks_the_head(monkeypatch, url):
    monkeypatch.delenv("FQ_RAY_IP", raising=False)
    assert waiting.head_url() == "http://127.0.0.1:8000"
    monkeypatch.setenv("FQ_RAY_IP", "qwen-head-svc.default.svc.cluster.local")
    assert waiting.head_url() == "http://qwen-head-svc.default.svc.cluster.local:8000"
    waiting.main(["--limit-s", "0.5", "--url", url])
