"""HAProxy as Ray Serve configures it, by our template, before a trivial replica: no Ray process, no model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rayserve_moe.serving.front.limits import UNNAMED, FrontLimits, write_launcher
from tests.support.cluster.ports import free_port
from tests.support.serving.ray_fronts import App, Scenario, write_ray_config

START_TIMEOUT_S = 300.0


class Replica(BaseHTTPRequestHandler):
    """Answers everything with two bytes; a path that is a number of seconds waits so long between them.

    Asked for `/vanish`, it is gone from then on, without an answer. After `/kept` its connection stays open.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/vanish":
            self.server.socket.shutdown(socket.SHUT_RDWR)  # as for a process that ends: the listener goes first
            self.server.socket.close()
            self.close_connection = True
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        if self.path != "/kept":
            self.send_header("Connection", "close")  # so that nothing is left of a replica that is shut down
        self.end_headers()
        self.wfile.write(b"1\r\na\r\n")
        if self.path == "/held":
            self.server.is_held.set()
            self.server.is_released.wait(START_TIMEOUT_S)
        if re.fullmatch(r"/[\d.]+", self.path):
            time.sleep(float(self.path[1:]))
        self.wfile.write(b"1\r\nb\r\n0\r\n\r\n")

    def do_POST(self) -> None:
        self.server.num_unnamed += UNNAMED in self.headers
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        return


class Server(ThreadingHTTPServer):
    """Says nothing of clients that leave early: health checks do. It counts requests that nobody has named.

    An answer to `/held` `is_held` until it `is_released`.
    """

    num_unnamed = 0
    request_queue_size = 1024

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Replica)
        self.is_held, self.is_released = threading.Event(), threading.Event()

    def handle_error(self, *_: object) -> None:
        return


class Router(BaseHTTPRequestHandler):
    """Names the replica of its server for every request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.counting:
            self.server.num_asked += 1
        answer = json.dumps({"replica_id": self.server.replica_id}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        return


class RouterServer(ThreadingHTTPServer):
    """A router that names one replica, and how often it was asked."""

    request_queue_size = 1024

    def __init__(self, replica_id: str) -> None:
        super().__init__(("127.0.0.1", 0), Router)
        self.replica_id, self.num_asked, self.counting = replica_id, 0, threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """Be gone: connections to it are refused."""
        self.shutdown()
        self.server_close()


def ray_config(
    directory: Path,
    *,
    port: int = 8000,
    replicas: tuple[int, ...] = (),
    routers: tuple[int, ...] = (),
    host: str = "127.0.0.1",
) -> Path:
    """Have the installed Ray write HAProxy's configuration for an application with replicas and routers at these ports.

    Replicas are named `replica-PORT`.
    """
    apps = (App("moe", replicas=replicas, routers=routers),) if replicas else ()
    return write_ray_config(directory, Scenario(apps, host=host), port=port, ports=(free_port(), free_port()))


@dataclass(frozen=True)
class Front:
    """A running HAProxy: where it answers, and the server behind it."""

    port: int
    health_port: int
    replica: Server


@contextlib.contextmanager
def running_replica() -> Iterator[Server]:
    """Serve a replica."""
    replica = Server()
    threading.Thread(target=replica.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield replica
    finally:
        replica.shutdown()
        replica.server_close()


@contextlib.contextmanager
def running_haproxy(config: Path, limits: FrontLimits, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start HAProxy by the launcher, as Ray does."""
    script = write_launcher(config.with_name("haproxy"), limits)
    command, environment = (
        [script, "-db", "-f", config, *arguments],
        os.environ | {"RAY_SERVE_HAPROXY_BINARY_PATH": script},
    )
    with config.with_name("log").open("ab") as log, subprocess.Popen(command, env=environment, stderr=log) as haproxy:
        try:
            yield haproxy
        finally:
            haproxy.kill()


@contextlib.contextmanager
def running_front(directory: Path, **limits: int) -> Iterator[Front]:
    """Start a replica, and HAProxy before it."""
    with running_replica() as replica:
        front = Front(free_port(), free_port(), replica)
        config = ray_config(directory, port=front.port, replicas=(replica.server_port,))
        with running_haproxy(config, front_limits(front.health_port, **limits)):
            wait_until_open(front.health_port)
            yield front


def front_limits(health_port: int, **limits: int) -> FrontLimits:
    """Limits that few clients do not meet."""
    return FrontLimits(health_port, **{"max_connections": 400, "max_connections_per_source": 300, **limits})


def wait_until_open(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline, f"nothing listens at {port}"
        time.sleep(0.02)
