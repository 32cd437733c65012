"""What strangers can do at HAProxy, with our edits of Ray's configuration, before a trivial replica."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.serving.haproxy_front import Front, running_front

NUM_SLOW = 200
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
WAYS_TO_BE_SLOW = {
    "nothing": b"",
    "half a line": b"POST /v1/comp",
    "half a head": HEAD,
    "half a body": HEAD + b"Content-Length: 100\r\n\r\n{",
}
NOT_HTTP = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01",
    "a method alone": b"GET\r\n\r\n",
    "a header without a name": HEAD + b": x\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a head that is too long": HEAD + b"X: " + b"x" * 1_000_000 + b"\r\n\r\n",
}
ANOTHER_SOURCE = "127.0.0.2"
DEADLINE_S = 60.0
AT_ONCE_S = 10.0


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    limits = {"max_connections": 400, "max_connections_per_source": NUM_SLOW, "head_timeout_s": 1, "body_timeout_s": 1}
    with running_front(tmp_path_factory.mktemp("front"), **limits) as running:
        yield running


def connected(front: Front, source: str = "127.0.0.1") -> socket.socket:
    """A connection that the front has taken, or will refuse."""
    return socket.create_connection(("127.0.0.1", front.port), timeout=DEADLINE_S, source_address=(source, 0))


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the front closes the connection."""
    try:
        return b"".join(iter(lambda: connection.recv(65536), b""))
    except ConnectionResetError:
        return b""


def health(port: int, *, source: str = "127.0.0.1") -> int:
    with httpx.Client(transport=httpx.HTTPTransport(local_address=source)) as client:
        return client.get(f"http://127.0.0.1:{port}/health", timeout=DEADLINE_S).status_code


@pytest.mark.parametrize("sent", WAYS_TO_BE_SLOW.values(), ids=WAYS_TO_BE_SLOW)
def test_a_request_that_does_not_come_is_given_up(sent: bytes, front: Front) -> None:
    with connected(front) as slow:
        slow.sendall(sent)
        started = time.monotonic()
        answer = rest_of(slow)
    assert time.monotonic() - started < DEADLINE_S
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", NOT_HTTP.values(), ids=NOT_HTTP)
def test_malformed_http_gets_a_page_of_the_front_and_reaches_no_replica(sent: bytes, front: Front) -> None:
    """HAProxy's parser answers before its rules apply, so the body is not an error object."""
    before = front.replica.num_unnamed
    with connected(front) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # it answers before it has read all
            connection.sendall(sent)
        answer = rest_of(connection)
    is_reset = answer == b"" and sent is NOT_HTTP["a head that is too long"]
    assert is_reset or (answer.startswith(b"HTTP/1.1 400 Bad request\r\n") and b"<html>" in answer)
    assert front.replica.num_unnamed == before
    assert health(front.port) == 200


def test_a_source_with_all_its_connections_open_stops_nobody_else(front: Front) -> None:
    """Health answers on its own listener to anyone, and at the front to other addresses, while a source is refused."""
    with ExitStack() as open_ones:
        slow = [open_ones.enter_context(connected(front)) for _ in range(NUM_SLOW)]
        for connection in slow:
            connection.sendall(HEAD)
        assert health(front.port, source=ANOTHER_SOURCE) == 200
        assert health(front.health_port) == 200
        with suppress(ConnectionResetError), connected(front) as refused:
            assert rest_of(refused) == b""
        for connection in slow:
            rest_of(connection)
    assert health(front.port) == 200


def test_a_stream_that_is_quiet_for_longer_than_a_request_may_take_is_not_cut(front: Front) -> None:
    assert httpx.get(f"http://127.0.0.1:{front.port}/2.5", timeout=DEADLINE_S).text == "ab"


def test_a_whole_body_arrives(front: Front) -> None:
    answer = httpx.post(f"http://127.0.0.1:{front.port}/", content=b"x" * 1_000_000, timeout=DEADLINE_S)
    assert answer.text == "ab"


def test_requests_that_their_clients_do_not_name_are_marked(front: Front) -> None:
    for headers, is_unnamed in ({"X-Request-Id": "mine"}, False), ({}, True), ({"X-Request-Id": "other"}, False):
        before = front.replica.num_unnamed
        assert httpx.post(f"http://127.0.0.1:{front.port}/", content=b"{}", headers=headers).text == "ab"
        assert front.replica.num_unnamed == before + is_unnamed


def test_only_health_is_asked_at_its_listener(front: Front) -> None:
    assert httpx.get(f"http://127.0.0.1:{front.health_port}/v1/models", timeout=DEADLINE_S).status_code == 404


def test_without_a_replica_every_request_is_answered_at_once(tmp_path: Path) -> None:
    """The first after its loss as the later ones: 503 with Retry-After and an error object, at both listeners."""
    with running_front(tmp_path) as front:
        assert health(front.port) == 200
        front.replica.shutdown()
        front.replica.server_close()
        for port in [front.port] * 3 + [front.health_port]:
            started = time.monotonic()
            answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=DEADLINE_S)
            assert time.monotonic() - started < AT_ONCE_S
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"]["code"] == "no_replica"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_replica_that_vanishes_under_a_later_request_is_no_reset(method: str, tmp_path: Path) -> None:
    """On a connection that has had an answer before, too."""
    body = b"{}" if method == "POST" else None
    with running_front(tmp_path) as front, httpx.Client(base_url=f"http://127.0.0.1:{front.port}") as client:
        assert client.request(method, "/kept", content=body, timeout=DEADLINE_S).status_code == 200
        answer = client.request(method, "/vanish", content=body, timeout=DEADLINE_S)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


@pytest.mark.slow
def test_4800_slow_connections_do_not_stop_health(tmp_path: Path) -> None:
    """As many as blocked everything: at most those of one source are held, and these for ten seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    limits = {"max_connections": 4096, "max_connections_per_source": 1296}
    with running_front(tmp_path, **limits) as front, ExitStack() as open_ones:
        for _ in range(4800):
            with suppress(ConnectionResetError, BrokenPipeError):
                open_ones.enter_context(connected(front)).sendall(HEAD)
        assert health(front.health_port) == 200
        assert health(front.port, source=ANOTHER_SOURCE) == 200
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                assert health(front.port) == 200
                return
            except httpx.TransportError:
                time.sleep(0.2)
        pytest.fail("the source that was slow is refused for ever")
