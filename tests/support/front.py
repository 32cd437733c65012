"""HAProxy as Ray Serve configures it, with our edits, before a trivial replica: no Ray process, no model."""

from __future__ import annotations

import contextlib
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

from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from rayserve_moe.serving.start.haproxy_config import UNNAMED, FrontLimits
from rayserve_moe.serving.start.haproxy_launcher import write_launcher
from tests.support.ports import free_port

START_TIMEOUT_S = 30.0


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
    """Says nothing of clients that leave early: health checks do. It counts requests that nobody has named."""

    num_unnamed = 0

    def handle_error(self, *_: object) -> None:
        return


def ray_config(directory: Path, *, port: int = 8000, replicas: tuple[int, ...] = (), host: str = "127.0.0.1") -> Path:
    """Have the installed Ray write HAProxy's configuration for an application with replicas at these ports."""
    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port),
        is_head=True,
        socket_path=str(directory / "admin.sock"),
        server_state_base=str(directory),
        server_state_file=str(directory / "server-state"),
        metrics_socket_path=str(directory / "metrics.sock"),
        stats_port=free_port(),
        metrics_port=free_port(),
        metrics_enabled=True,
        hard_stop_after_s=5,
    )
    servers = [ServerConfig(f"replica-{number}", "127.0.0.1", number) for number in replicas]
    fallback = ServerConfig("fallback", "127.0.0.1", 1)
    backend = BackendConfig("http-moe", "/", servers=servers, fallback_server=fallback, app_name="moe")
    path = directory / "haproxy.cfg"
    HAProxyApi(config, {"http-moe": backend} if replicas else {}, str(path))._generate_config_file_internal()
    return path


@dataclass(frozen=True)
class Front:
    """A running HAProxy: where it answers, and the server behind it."""

    port: int
    health_port: int
    replica: Server


@contextlib.contextmanager
def running_front(directory: Path, **limits: int) -> Iterator[Front]:
    """Start a replica and HAProxy by the launcher, as Ray does."""
    replica = Server(("127.0.0.1", 0), Replica)
    threading.Thread(target=replica.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    front = Front(free_port(), free_port(), replica)
    config = ray_config(directory, port=front.port, replicas=(replica.server_port,))
    script = write_launcher(
        directory / "haproxy",
        FrontLimits(
            front.health_port,
            max_connections=limits.pop("max_connections", 400),
            max_connections_per_source=limits.pop("max_connections_per_source", 300),
            **limits,
        ),
    )
    command, environment = [script, "-db", "-f", config], os.environ | {"RAY_SERVE_HAPROXY_BINARY_PATH": str(script)}
    with (directory / "log").open("wb") as log, subprocess.Popen(command, env=environment, stderr=log) as haproxy:
        try:
            wait_until_open(front.health_port)
            yield front
        finally:
            haproxy.kill()
            replica.shutdown()
            replica.server_close()


def wait_until_open(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline, f"nothing listens at {port}"
        time.sleep(0.02)
