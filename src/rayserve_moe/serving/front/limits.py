"""Limits of HAProxy for clients, the script that applies them, and its own answers while no replica answers."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from pathlib import Path

HEALTH_CONNECTIONS = 64
"""Connections reserved for the `/health` listener and HAProxy's own pages."""
ROUTER_CONNECTIONS = 64
"""Connections reserved for queries to routers."""
FILES_PER_CONNECTION = 3
"""The client's socket, the replica's socket, and the pipes between them."""
OTHER_FILES = 600
"""Files of HAProxy itself, and of the connections reserved for `/health` and routers."""
UNNAMED = "x-request-unnamed"
"""Header of requests without a client's `X-Request-Id`, because HAProxy adds that header for routers."""
RETRY_AFTER_S = 5
OWN_ANSWERS = {
    408: (408, "invalid_request_error", "request_timeout", "the body of the request did not arrive in time"),
    502: (503, "service_unavailable_error", "replica_lost", "the replica was lost; try again later"),
    503: (503, "service_unavailable_error", "no_replica", "no replica of the model is serving now; try again later"),
    504: (503, "service_unavailable_error", "replica_late", "the replica did not answer in time; try again later"),
}
"""HAProxy's own answers by its status: the client's status, type, code and message."""


@dataclass(frozen=True)
class FrontLimits:
    """Connection limits and request timeouts, for a single replica of every application (see `for_replicas`)."""

    health_port: int
    """Port of a separate listener for `/health` on 127.0.0.1, with reserved connections."""
    max_connections: int
    """Maximum number of connections."""
    max_connections_per_source: int
    """Maximum number of connections per client address."""
    head_timeout_s: int = 10
    """Seconds within which request headers must arrive."""
    body_timeout_s: int = 60
    """Seconds within which a request body must arrive."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """Requests that a replica accepts, by application (see `haproxy.cfg.j2`)."""
    host: str = ""
    """Address of the HTTP frontend (`*` for all); empty keeps Ray's, which HAProxy's own pages always use."""
    certificate: str = ""
    """Path of a certificate chain, with its key in a `.key` file beside it, for TLS at the HTTP port; empty: HTTP."""

    def for_replicas(self, num_replicas: int, *, num_applications: int, num_files: int) -> FrontLimits:
        """Return limits for replicas of all applications, and for a process with `num_files` open files.

        HAProxy refuses to start with more connections than it may open files for.
        """
        factor = max(1, math.ceil(num_replicas / max(1, num_applications)))
        possible = max(1, (num_files - OTHER_FILES) // FILES_PER_CONNECTION)
        return replace(
            self,
            max_connections=min(factor * self.max_connections, possible),
            max_connections_per_source=min(factor * self.max_connections_per_source, possible),
        )


def write_launcher(path: Path, limits: FrontLimits) -> Path:
    """Write the script for `RAY_SERVE_HAPROXY_BINARY_PATH`, writable only by its owner; return its path."""
    command = [sys.executable, "-m", "rayserve_moe.serving.front.launcher", json.dumps(asdict(limits))]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    path.chmod(0o700)
    return path


def answer_files() -> dict[str, str]:
    """Return files for `errorfile` by name, so that HAProxy's own answers are error objects like every route's."""
    return {f"{status}.http": _answer(*answer) for status, answer in OWN_ANSWERS.items()}


def _answer(status: int, kind: str, code: str, message: str) -> str:
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    headers = ["Content-Type: application/json", f"Content-Length: {len(body)}", "Cache-Control: no-cache"]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append(f"Retry-After: {RETRY_AFTER_S}")
    return "\r\n".join([f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *headers, "", body])
