"""Edits of the HAProxy configuration that Ray Serve generates, for options without a variable in Ray.

Ray configures routing; these edits add limits for clients and the answers while no replica serves. Every edit must
match exactly once, so that a changed template is rejected instead of half edited.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from rayserve_moe.serving.kept_paths import KEPT_PATHS

MARK = "# edited by rayserve_moe\n"
"""First line of an edited configuration."""
HEALTH_CONNECTIONS = 64
"""Connections reserved for the `/health` listener and HAProxy's own pages."""
ROUTER_CONNECTIONS = 64
"""Connections reserved for queries to routers (see `haproxy_routers`)."""
UNNAMED = "x-request-unnamed"
"""Header of requests without a client's `X-Request-Id`, because Ray's configuration adds that header."""
RETRY_AFTER_S = 5
CLOSE = "option http-server-close"
TLS = "ssl-min-ver TLSv1.2 alpn http/1.1"
OWN_ANSWERS = {
    408: (408, "invalid_request_error", "request_timeout", "the body of the request did not arrive in time"),
    502: (503, "service_unavailable_error", "replica_lost", "the replica was lost; try again later"),
    503: (503, "service_unavailable_error", "no_replica", "no replica of the model is serving now; try again later"),
    504: (503, "service_unavailable_error", "replica_late", "the replica did not answer in time; try again later"),
}
"""HAProxy's own answers by its status: the client's status, type, code and message."""

_REPLICA = re.compile(r"^( +server \S+ \S+ check observe layer4 error-limit )\d+( on-error mark-down)$", re.MULTILINE)
_FALLBACK = re.compile(r"^( +server .* backup)$", re.MULTILINE)
_APP = re.compile(r"^ +use_backend (\S+) if is_\S+$", re.MULTILINE)
_BIND = re.compile(r"^ +bind \S.*\n", re.MULTILINE)
OF_LATE_MS = 100
"""Time for which a replica's rejection makes HAProxy reject further requests."""
RETRY_WHEN_BUSY_S = 1
MESSAGE = "the server is busy: its queue of waiting requests is full"
BUSY = {"error": {"message": MESSAGE, "type": "overloaded_error", "param": None, "code": "queue_full"}}
"""Error object of replicas that reject."""
_APP_BACKEND = re.compile(r"^    use_backend (http-(\S+)) if is_\1$", re.MULTILINE)
_ROUTING = re.compile(r"^    # (?:Set txn\.ingress_request_router_app to|Static routing based on path)", re.MULTILINE)
_ROUTED = "-via-ingress-request-router"
_ID = "txn.named"


class UnknownTemplateError(ValueError):
    """Error for a configuration to which these edits do not apply."""


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
    """Requests that a replica accepts, by application (see `refusing`)."""
    host: str = ""
    """Address of the HTTP frontend (`*` for all); empty keeps Ray's, which HAProxy's own pages always use."""
    certificate: str = ""
    """Path of a certificate chain, with its key in a `.key` file beside it, for TLS at the HTTP port; empty: HTTP."""


def answer_files() -> dict[str, str]:
    """Return files for `errorfile` by name, so that HAProxy's own answers are error objects like every route's."""
    return {f"{status}.http": _answer(*answer) for status, answer in OWN_ANSWERS.items()}


def for_replicas(limits: FrontLimits, text: str) -> FrontLimits:
    """Return limits for the number of replicas per application in a configuration."""
    factor = max(1, math.ceil(len(_REPLICA.findall(text)) / max(1, len(set(_APP.findall(text))))))
    return replace(
        limits,
        max_connections=factor * limits.max_connections,
        max_connections_per_source=factor * limits.max_connections_per_source,
    )


def edited(text: str, *, limits: FrontLimits, answers: str) -> str:
    """Return Ray's configuration with our limits; an edited one is returned unchanged.

    `answers` is the directory of the `answer_files`.

    Raises: UnknownTemplateError if a line is not as expected.
    """
    if text.startswith(MARK):
        return text
    apps = _APP.findall(text)
    for pattern, replacement in _edits(text, limits=limits, answers=answers, serves=bool(apps)):
        text, number = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if number != 1:
            raise UnknownTemplateError(
                f"HAProxy's configuration has {pattern!r} {number} times instead of once: Ray's template has changed"
            )
    text = refusing(_FALLBACK.sub(r"\1 disabled", _REPLICA.sub(r"\g<1>1\2", text)), limits.capacity)
    return MARK + text.rstrip("\n") + "\n" + _health_listener(limits, apps[-1] if apps else "default_backend")


def is_edited(text: str) -> bool:
    """Return True if a configuration is ready for HAProxy."""
    return text.startswith(MARK)


def serves(text: str) -> bool:
    """Return True if an edited configuration has replicas."""
    return is_edited(text) and _REPLICA.search(text) is not None


def takes_requests(text: str) -> bool:
    """Return True if a configuration has a listener (see `without_listeners`)."""
    return _BIND.search(text) is not None


def without_listeners(text: str) -> str:
    """Return a configuration that accepts no requests, while another process does."""
    return _BIND.sub("", text)


def _edits(text: str, *, limits: FrontLimits, answers: str, serves: bool) -> list[tuple[str, str]]:
    """Return the patterns of lines with their replacements; each must match once."""
    bound = re.search(r"^frontend http_frontend\n +bind (\S+):\d+$", text, re.MULTILINE)
    interface = bound[1] if bound and bound[1] != "*" else ""
    host = limits.host or r"\1"
    tls = f" ssl crt {limits.certificate} {TLS}".replace("\\", r"\\") if limits.certificate else ""
    replicas, backends = len(_REPLICA.findall(text)), len(set(_APP.findall(text)))
    # Another replica is tried at once, the same one only after a second.
    retries = 1 if replicas > backends else 0
    errorfiles = "\n".join(f"    errorfile {status} {answers}/{status}.http" for status in OWN_ANSWERS)
    nothing_here = (
        r"\g<0>" if serves else r"backend default_backend\n    http-request return status 503 default-errorfiles"
    )
    return [
        (r"^( +stats socket \S+) mode 666 (level admin .*)$", r"\1 mode 600 \2"),
        (r"^    maxconn \d+$", f"    maxconn {limits.max_connections + HEALTH_CONNECTIONS + ROUTER_CONNECTIONS}"),
        (
            r"^ +timeout client \d+s$",
            # Each request has its own connection: losing a replica under a kept-alive one would be a bare reset.
            rf"\g<0>\n    timeout http-request {limits.head_timeout_s}s\n    retries {retries}\n    {CLOSE}",
        ),
        (r"^ +errorfile 502 \S+\n +errorfile 503 \S+\n +errorfile 504 \S+$", errorfiles.replace("\\", r"\\")),
        (r"^frontend prometheus\n +bind :(\d+)$", rf"frontend prometheus\n    bind {interface}:\1"),
        (r"^listen stats\n +bind \*:(\d+)$", rf"listen stats\n    bind {interface}:\1"),
        (
            r"^frontend http_frontend\n +bind (\S+):(\d+)$",
            rf"frontend http_frontend\n    bind {host}:\2{tls}\n{_frontend_limits(limits)}",
        ),
        (r"^backend default_backend\n +http-request return status 404 .*$", nothing_here),
    ]


def _frontend_limits(limits: FrontLimits) -> str:
    """Return lines of the frontend: connections per source, marking of unnamed requests, and the body timeout."""
    return f"""\
    maxconn {limits.max_connections}
    stick-table type ipv6 size 100k expire 10m store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc0_conn_cur gt {limits.max_connections_per_source} }}
    http-request set-header {UNNAMED} 1 unless {{ req.hdr(x-request-id) -m found }}
    http-request wait-for-body time {limits.body_timeout_s}s if METH_POST"""


def _health_listener(limits: FrontLimits, backend: str) -> str:
    return f"""\
frontend health
    bind 127.0.0.1:{limits.health_port}
    maxconn {HEALTH_CONNECTIONS // 2}
    http-request return status 404 unless {{ path /health }}
    default_backend {backend}
"""


def _answer(status: int, kind: str, code: str, message: str) -> str:
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    headers = ["Content-Type: application/json", f"Content-Length: {len(body)}", "Cache-Control: no-cache"]
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append(f"Retry-After: {RETRY_AFTER_S}")
    return "\r\n".join([f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *headers, "", body])


def refusing(text: str, capacity: Mapping[str, int]) -> str:
    """Return an edited configuration that rejects requests beyond `capacity` per replica, by application.

    A rejection by a replica costs 2.6 ms of CPU on the way. HAProxy rejects if both hold: the number of requests
    reaches the replicas' capacity, and a replica has rejected a request recently. A few requests still reach a replica,
    so that its metrics count rejections and free capacity is noticed.
    """
    capacity = {safe_name(name): number for name, number in capacity.items()}
    backends = _APP_BACKEND.findall(text)  # longer paths first
    rules, longer = [], ""
    for number, (backend, name) in enumerate(backends):
        if name in capacity:
            routed = backend + _ROUTED
            counted = routed if f"backend {routed}\n" in text else backend
            rules += _rules(
                number, counted, is_generation=f"METH_POST for_generation is_{backend}{longer}", capacity=capacity[name]
            )
        longer += f" !is_{backend}"
    if not rules:
        return text
    paths = " ".join(sorted(KEPT_PATHS))
    begin = [
        f"    acl for_generation path -m end {paths}",
        "    acl goes_on req.hdr(last-event-id) -m found",
        f"    http-request set-var({_ID}) req.hdr(x-request-id) if METH_POST for_generation",
        f"    http-after-response set-header x-request-id %[var({_ID})] if {{ status 429 }} {{ var({_ID}) -m found }}",
    ]
    return _ROUTING.sub(lambda found: "\n".join([*begin, *rules, found[0]]), text, count=1)


def safe_name(application: str) -> str:
    """Return Ray's name of an application in HAProxy's configuration."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", application.replace("#", "-").replace("/", "."))


def _rules(number: int, backend: str, *, is_generation: str, capacity: int) -> list[str]:
    refused_at = f"proc.refused_at_{number}"
    is_full = f"{{ be_conn({backend}),sub(txn.capacity) ge 0 }}"
    has_refused = f"{{ date(0,ms),sub({refused_at}) 0:{OF_LATE_MS} }}"  # not if the clock was set back
    refuse = f"http-request return status 429 content-type application/json hdr Retry-After {RETRY_WHEN_BUSY_S}"
    condition = f"{is_generation} {is_full} {has_refused} !goes_on"
    is_refused = f"{{ status 429 }} {{ be_name -m str {backend} }} {{ var(txn.capacity) -m found }}"
    return [
        f"    http-request set-var(txn.capacity) nbsrv({backend}),mul({capacity}) if {is_generation}",
        f"    {refuse} string '{json.dumps({'type': 'error'} | BUSY)}' if {condition} {{ path -m end /v1/messages }}",
        f"    {refuse} string '{json.dumps(BUSY)}' if {condition}",
        f"    http-response set-var({refused_at}) date(0,ms) if {is_refused}",
    ]
