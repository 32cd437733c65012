"""Bodies that cost more than they are worth: they hold up nobody, and are given up with their clients."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import re
import socket
import statistics
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest

from rayserve_moe.cluster.startup_memory import frozen
from tests.http.conftest import served
from tests.support.serving.http_client import check_error, wait_until

MANY_KEYS = b"{" + b",".join(b'"k%d":1' % i for i in range(600_000)) + b"}"
MANY_IDS = b'{"prompt":[' + b"5," * 2_000_000 + b"5]}"
LONG_TEXT = json.dumps({"prompt": "a b " * 1_000_000}).encode()
DEEP = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
STREAMED = {"prompt": [5, 6], "max_tokens": 480, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize(
    ("body", "param"),
    [(MANY_KEYS, None), (DEEP, None), (MANY_IDS, "prompt"), (LONG_TEXT, "prompt")],
    ids=["keys", "nesting", "ids", "text"],
)
def test_it_is_refused(http, body, param):
    assert check_error(http.post("/v1/completions", content=body), 400)["param"] == param


def test_a_long_id_to_abort_is_looked_for_at_no_cost(http):
    """A pattern made of it would take long to compile, on the event loop: as long as eighty of these do."""
    started = time.process_time()
    re.compile(re.escape("a+" * 50_000))
    compiled, started = time.process_time() - started, time.process_time()
    assert http.post("/abort_request", json={"rid": "a+" * 4_000_000}).status_code == 200
    assert time.process_time() - started < 8 * compiled


def test_long_messages_are_refused(http):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a b " * 100_000}] * 3}]
    assert check_error(http.post("/v1/chat/completions", json={"messages": messages}), 400)["param"] == "messages"


@pytest.mark.slow
def test_a_running_stream_goes_on_while_they_arrive(url, http, unhurried):
    """Few gaps of the stream have as much work of the process in them as it takes to parse half of one in a piece.

    Each of them would make such a gap if it were. Servers leave what they loaded out of garbage collection; a
    processor that others use counts for none of the gaps, but the other threads work on while it keeps the reader.
    """
    started = time.process_time()
    json.loads(MANY_KEYS, object_pairs_hook=dict)
    at_once = time.process_time() - started
    stop, answered = threading.Event(), []

    def besiege():
        with httpx.Client(base_url=url, timeout=120) as client:
            while not stop.is_set():
                answered.append(client.post("/v1/completions", content=MANY_KEYS).status_code)

    with contextlib.ExitStack() as undo:
        hostile = threading.Thread(target=besiege)
        undo.enter_context(frozen())
        undo.callback(hostile.join)
        undo.callback(stop.set)
        hostile.start()
        gaps = _gaps_of_a_stream(http)
    assert set(answered) == {400} and len(answered) > 1
    num_long = sum(gap >= at_once / 2 for gap in gaps)
    assert num_long <= len(answered) // 4, (num_long, len(answered), max(gaps), statistics.median(gaps), at_once)


def test_what_is_held_is_bounded_and_given_back(engine):
    """While one body is on its way, others find no room; afterwards they do."""
    text = json.dumps({"prompt": [5, 6], "max_tokens": 1, "user": "x" * 60_000}).encode()
    with served(engine, max_intake_bytes=100_000) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as slow:
            slow.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode())
            slow.sendall(text[:-1])
            wait_until(lambda: httpx.post(f"{url}/v1/completions", content=text, timeout=60).status_code == 429)
            refusal = httpx.post(f"{url}/v1/completions", content=text, timeout=60)
            assert check_error(refusal, 429)["code"] == "intake_full" and refusal.headers["retry-after"]
            slow.sendall(text[-1:])
            assert slow.recv(64).startswith(b"HTTP/1.1 200")
        assert httpx.post(f"{url}/v1/completions", content=text, timeout=60).status_code == 200


def _gaps_of_a_stream(http):
    with http.stream("POST", "/v1/completions", json=STREAMED) as answer:
        arrivals = [time.process_time() for line in answer.iter_lines() if line]
    return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def test_a_compressed_body_is_refused_as_such(http):
    body = gzip.compress(json.dumps({"prompt": [5], "max_tokens": 1}).encode())
    refused = http.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})
    assert "compressed" in check_error(refused, 400)["message"]
    plain = {"prompt": [5], "max_tokens": 1}
    assert http.post("/v1/completions", json=plain, headers={"content-encoding": "identity"}).status_code == 200
