"""HAProxy refuses for replicas that are full, and only then."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from ray.serve._private.haproxy import HAProxyManager

from rayserve_moe.engine.admission import EngineBusyError
from rayserve_moe.serving.errors import as_api_error
from rayserve_moe.serving.front.launcher import configure, safe_name
from tests.support.cluster.ports import free_port
from tests.support.serving.haproxy_front import RouterServer, front_limits, ray_config, running_haproxy, wait_until_open
from tests.support.serving.http_client import wait_until

PLACES = 2
REFUSAL = as_api_error(EngineBusyError())
ASK = {"prompt": "x"}


class Replica(BaseHTTPRequestHandler):
    """Holds requests until they are released, and refuses more than its server has places for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: ReplicaServer = self.server
        with server.changing:
            server.num_asked += 1
            is_refused = server.num_held >= server.num_places or b"many" in body
            server.num_held += not is_refused
        if not is_refused:
            server.is_released.wait(60)
            with server.changing:
                server.num_held -= 1
        answer = json.dumps(REFUSAL.body() if is_refused else {}).encode()
        self.send_response(429 if is_refused else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


class ReplicaServer(ThreadingHTTPServer):
    """A replica of so many places, and how often it was asked."""

    def __init__(self, num_places: int) -> None:
        super().__init__(("127.0.0.1", 0), Replica)
        self.num_places, self.num_asked, self.num_held = num_places, 0, 0
        self.changing, self.is_released = threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def handle_error(self, *_: object) -> None:
        return


class Front:
    """HAProxy before a replica, of which it is told that it takes `PLACES`; `is_routed` by a router of prefixes."""

    def __init__(self, directory: Path, *, num_places: int, is_routed: bool) -> None:
        self.port, self.replica = free_port(), ReplicaServer(num_places)
        self.router = RouterServer(f"replica-{self.replica.server_port}")
        routers = (self.router.server_port,) if is_routed else ()
        self.config = ray_config(directory, port=self.port, replicas=(self.replica.server_port,), routers=routers)
        self.threads = ThreadPoolExecutor(8)

    def post(self, body: object = ASK, path: str = "/v1/completions", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", json=body, headers=named, timeout=60)

    def hold(self, count: int) -> list[Future[httpx.Response]]:
        """Have so many requests run."""
        held = [self.threads.submit(self.post) for _ in range(count)]
        wait_until(lambda: self.replica.num_held == count)
        return held

    def refusal_by_front(self, path: str = "/v1/completions", body: object = ASK) -> httpx.Response:
        """Ask until the front refuses without asking the replica."""
        while True:
            before = self.replica.num_asked
            answer = self.post(body, path)
            assert answer.status_code == 429
            if self.replica.num_asked == before:
                return answer


@contextlib.contextmanager
def running(directory: Path, *, num_places: int = PLACES, is_routed: bool = True) -> Iterator[Front]:
    front = Front(directory, num_places=num_places, is_routed=is_routed)
    health_port = free_port()
    with running_haproxy(front.config, front_limits(health_port, capacity={"moe": PLACES})):
        wait_until_open(health_port)
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{health_port}/health").status_code == 200)
        try:
            yield front
        finally:
            front.replica.is_released.set()
            front.threads.shutdown()
            front.replica.shutdown()
            front.replica.server_close()
            front.router.close()


@pytest.mark.parametrize("is_routed", [False, True])
def test_a_full_fleet_is_refused_for_until_a_place_is_free(is_routed: bool, tmp_path: Path) -> None:
    with running(tmp_path, is_routed=is_routed) as front:
        held = front.hold(PLACES)
        answer = front.refusal_by_front()
        assert answer.json() == REFUSAL.body() and answer.headers["retry-after"] == "1"
        named = [front.post(x_request_id="mine") for _ in range(2)]
        assert {one.headers.get("x-request-id") for one in named if one.status_code == 429} == {"mine"}
        assert front.refusal_by_front("/v1/messages").json() == {"type": "error", **REFUSAL.body()}
        front.replica.is_released.set()
        assert [one.result().status_code for one in held] == [200] * PLACES
        assert front.post().status_code == 200, "the front holds no grudge"


def test_a_large_body_is_refused_by_an_answer_not_by_a_reset(tmp_path: Path) -> None:
    with running(tmp_path) as front:
        front.hold(PLACES)
        assert front.refusal_by_front(body={"prompt": "x" * 5_000_000}).json() == REFUSAL.body()


def test_what_is_no_new_request_for_generation_reaches_the_replica(tmp_path: Path) -> None:
    with running(tmp_path) as front:
        front.hold(PLACES)
        for path, headers in (("/v1/completions", {"last_event_id": "3"}), ("/resume_request", {}), ("/abort", {})):
            front.refusal_by_front()
            before = front.replica.num_asked
            front.post(path=path, **headers)
            assert front.replica.num_asked == before + 1, path


def test_a_refusal_alone_refuses_no_other(tmp_path: Path) -> None:
    """A body of many prompts does not fit; others do."""
    with running(tmp_path) as front:
        held = front.hold(PLACES - 1)
        assert front.post({"prompt": ["many"]}).status_code == 429
        before = front.replica.num_asked
        held.append(front.threads.submit(front.post))
        wait_until(lambda: front.replica.num_asked == before + 1)
        front.replica.is_released.set()
        assert {one.result().status_code for one in held} == {200}


def test_connections_alone_refuse_none(tmp_path: Path) -> None:
    """A client that reads slowly has a connection, and no place any longer."""
    with running(tmp_path, num_places=PLACES + 3) as front:
        held = front.hold(PLACES + 3)
        front.replica.is_released.set()
        assert {one.result().status_code for one in held} == {200}


@pytest.mark.parametrize("name", ["qwen3-moe", "Qwen/Qwen3", "a model", "a#b", "\u00fc"])
def test_applications_are_known_by_rays_names(name: str) -> None:
    assert safe_name(name) == HAProxyManager.get_safe_name(name)


def test_an_application_whose_capacity_is_not_known_is_left_alone(tmp_path: Path) -> None:
    config = ray_config(tmp_path, replicas=(30000,))
    configure(config, front_limits(8001, capacity={"other": 1}))
    assert "for_generation" not in config.read_text()
