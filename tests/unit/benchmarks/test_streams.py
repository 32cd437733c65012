"""What the HTTP benchmark's client reads is what was sent, and CPU time is counted where it was spent."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.serve_process import cpu_seconds_by_part, serve_config
from benchmarks.stream_client import Received, events_of, request_of
from rayserve_moe.config.load import settings_from

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices":[{"text":"a"}]}', b'data: {"usage":{"completion_tokens":7}}', b"data: [DONE]"]


def read_all(sent: bytes) -> list[bytes]:
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return [event async for event in events_of(reader)]

    return asyncio.run(read())


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)] + [b""]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


@pytest.mark.parametrize("size", [1, 7, 33, 1000])
def test_events_do_not_depend_on_how_they_were_cut(size):
    body = b"".join(event + b"\n\n" for event in EVENTS)
    assert read_all(HEAD + chunked(body, size)) == EVENTS


def test_a_refusal_is_an_error_with_the_servers_words():
    with pytest.raises(RuntimeError, match="404 Not Found: no such model"):
        read_all(b"HTTP/1.1 404 Not Found\r\n\r\nno such model")


def test_a_stream_counts_tokens_by_its_last_event_and_time_by_its_first():
    received = Received()
    for now, event in enumerate(EVENTS, start=5):
        received.take(event, now=now)
    assert (received.first_event_at, received.num_events, received.num_new_tokens) == (5, 2, 7)


def test_an_error_in_a_stream_is_an_error():
    with pytest.raises(RuntimeError, match="model failed"):
        Received().take(b'data: {"error":{"message":"model failed"}}', now=0)


def test_a_request_says_how_long_its_body_is():
    head, _, body = request_of([3, 4], 9, host="here").partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body)["prompt"] == [3, 4]


def test_cpu_seconds_of_a_family_are_counted_by_title_and_those_of_others_not():
    processes = {
        10: (1, "serve run", 1.0),
        11: (10, "raylet", 2.0),
        12: (11, "ray::ServeReplica:bench:moe-server", 4.0),
        13: (11, "ray::HostWorker.execute", 8.0),
        14: (11, "ray::ProxyActor", 16.0),
        20: (1, "ray::HostWorker", 32.0),
    }
    seconds = cpu_seconds_by_part(processes, 10)
    assert seconds == {"proxy": 16.0, "replica": 4.0, "host_worker": 8.0, "ray_daemons": 3.0}


def test_the_application_gets_settings_that_load():
    config = serve_config({"model_path": "somewhere", "idle_release_s": 1.0}, port=8123)
    assert config["http_options"]["port"] == 8123
    assert settings_from(config["applications"][0]["args"]).cluster.idle_release_s == 1.0
