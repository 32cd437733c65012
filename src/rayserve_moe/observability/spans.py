"""Spans for OpenTelemetry: sent as OTLP over HTTP, in JSON, if the usual variables name an endpoint.

    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG, OTEL_SDK_DISABLED

It needs no package of OpenTelemetry, and nothing runs without an endpoint.
"""

from __future__ import annotations

import json
import logging
import queue
import random
import re
import secrets
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from rayserve_moe.config.load import variable

log = logging.getLogger(__name__)

PREFIX = "OTEL_EXPORTER_OTLP_"
INTERNAL, SERVER = 1, 2
"""Kinds of spans."""
ERROR = 2
"""Status code of a failed span."""
MAX_WAITING, MAX_BATCH = 8192, 512
"""Spans that wait for the exporter, beyond which new ones are dropped, and spans of a request of the exporter."""
BATCH_S, POST_TIMEOUT_S = 1.0, 10.0
SAMPLED = 1
"""Bit of the flags of a parent."""
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """The span of a caller, by the header `traceparent` of W3C."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""
    """The header `tracestate`, unchanged."""


@dataclass(frozen=True)
class Span:
    """A span; times are seconds since 1970."""

    name: str
    start: float
    end: float
    trace_id: str
    parent_id: str = ""
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    kind: int = INTERNAL
    attributes: Mapping[str, Any] = field(default_factory=dict)
    is_error: bool = False
    state: str = ""


class SpanExporter:
    """Sends spans to an endpoint from a thread of its own. Spans that it does not take are dropped, with a warning."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, resource: Mapping[str, Any] | None = None,
        ratio: float = 1.0,
    ) -> None:  # fmt: skip
        self._url, self._ratio = url, ratio
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._resource = {"service.name": "rayserve_moe", **(resource or {})}
        self._waiting: queue.Queue[Sequence[Span]] = queue.Queue(MAX_WAITING)
        self._has_warned = False
        threading.Thread(target=self._send_all, name="spans", daemon=True).start()

    def takes(self, parent: Parent | None) -> bool:
        """Return True if a request is traced: as its caller decided, else by the ratio."""
        return parent.is_sampled if parent is not None else random.random() < self._ratio

    def add(self, spans: Sequence[Span]) -> None:
        """Queue the spans of a request; drops them if the endpoint is too slow."""
        try:
            self._waiting.put_nowait(spans)
        except queue.Full:
            self._warn("too many spans wait")

    def flush(self) -> None:
        """Wait until all queued spans are sent or dropped."""
        self._waiting.join()

    def _send_all(self) -> None:
        while True:
            groups = [self._waiting.get()]
            until = time.monotonic() + BATCH_S
            while sum(map(len, groups)) < MAX_BATCH and (left := until - time.monotonic()) > 0:
                try:
                    groups.append(self._waiting.get(timeout=left))
                except queue.Empty:
                    break
            try:
                self._post([span for group in groups for span in group])
            except (OSError, ValueError) as error:
                self._warn(str(error))
            finally:
                for _ in groups:
                    self._waiting.task_done()

    def _post(self, spans: Sequence[Span]) -> None:
        body = json.dumps(request_of(spans, self._resource)).encode()
        request = urllib.request.Request(self._url, body, self._headers)
        with urllib.request.urlopen(request, timeout=POST_TIMEOUT_S) as answer:
            answer.read()

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("spans are dropped, which is said once: %s: %s", self._url, reason)


def exporter_from_environment() -> SpanExporter | None:
    """Return the exporter that the environment asks for, or None; logs a warning for a protocol other than HTTP."""
    endpoint = variable(f"{PREFIX}ENDPOINT")
    url = variable(f"{PREFIX}TRACES_ENDPOINT") or (f"{endpoint.rstrip('/')}/v1/traces" if endpoint else "")
    sampler = variable("OTEL_TRACES_SAMPLER")
    if not url or variable("OTEL_SDK_DISABLED").lower() == "true" or sampler.endswith("always_off"):
        return None
    protocol = variable(f"{PREFIX}TRACES_PROTOCOL") or variable(f"{PREFIX}PROTOCOL")
    if protocol == "grpc" or not url.startswith(("http://", "https://")):
        log.warning("no spans are sent: %sENDPOINT must be the collector's OTLP receiver for HTTP (port 4318)", PREFIX)
        return None
    headers = pairs(variable(f"{PREFIX}HEADERS")) | pairs(variable(f"{PREFIX}TRACES_HEADERS"))
    resource: dict[str, str] = pairs(variable("OTEL_RESOURCE_ATTRIBUTES"))
    if name := variable("OTEL_SERVICE_NAME"):
        resource["service.name"] = name
    return SpanExporter(url, headers=headers, resource=resource, ratio=_ratio(sampler))


def _ratio(sampler: str) -> float:
    if not sampler.endswith("traceidratio"):
        return 1.0
    try:
        return min(1.0, max(0.0, float(variable("OTEL_TRACES_SAMPLER_ARG") or 1.0)))
    except ValueError:
        log.warning("OTEL_TRACES_SAMPLER_ARG is no number: all requests are traced")
        return 1.0


def pairs(text: str) -> dict[str, str]:
    """Return the `name=value,...` of a variable, with values in URL encoding; parts without `=` are left out."""
    parts = (part.partition("=") for part in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, equals, value in parts if equals and name.strip()}


def parent_of(traceparent: str, tracestate: str = "") -> Parent | None:
    """Return the caller's span, or None without a valid header."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or (found[4] and traceparent.strip().startswith("00-")):
        return None
    return Parent(found[1], found[2], bool(int(found[3], 16) & SAMPLED), tracestate.strip())


def new_trace_id() -> str:
    """Return a random trace id."""
    return secrets.token_hex(16)


def request_of(spans: Sequence[Span], resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an export request, an ExportTraceServiceRequest in JSON."""
    scope = {"scope": {"name": "rayserve_moe"}, "spans": [_encoded(span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}


def _encoded(span: Span) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(int(span.start * 1e9)),
        "endTimeUnixNano": str(int(max(span.start, span.end) * 1e9)),
        "attributes": _attributes(span.attributes),
    }
    optional = {"parentSpanId": span.parent_id, "traceState": span.state}
    encoded |= {name: value for name, value in optional.items() if value}
    return encoded | ({"status": {"code": ERROR}} if span.is_error else {})


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
