"""Requests in progress, answers by route, and a log line and spans per request for a server that is asked for them.

A draining server rejects new requests.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_moe.answers.request_record import RECORD, RUNNING, RequestRecord
from rayserve_moe.observability.logs import REQUEST_ID
from rayserve_moe.observability.spans import SERVER, Parent, Span, SpanExporter, new_trace_id, parent_of
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.serving.errors import ApiError

log = logging.getLogger(__name__)

FAILED = 500

NO_ROUTE = "none"
"""Label for unknown paths and requests rejected before routing, because clients choose paths."""


class Traffic:
    """Requests in progress until the last byte of their answers, and answers by route path and status."""

    def __init__(self) -> None:
        self.num_open = 0
        self.is_draining = False
        self.answered: Counter[tuple[str, int]] = Counter()

    def drain(self) -> None:
        """Reject generation requests from now on."""
        self.is_draining = True

    async def refuse_when_draining(self) -> None:
        """Raise a 503 while draining. It is a coroutine because FastAPI runs plain functions on a thread."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down: send this to another one", code="draining")


def count_traffic(app: ASGIApp, traffic: Traffic) -> ASGIApp:
    """Return ASGI middleware that updates `traffic`; streams pass through unchanged."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", NO_ROUTE)
                traffic.answered[route, message["status"]] += 1
            await send(message)

        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        traffic.num_open += 1
        try:
            await app(scope, receive, send_counted)
        finally:
            traffic.num_open -= 1

    return counted


def record_requests(app: ASGIApp, *, writes_lines: bool, exporter: SpanExporter | None, model: str) -> ASGIApp:
    """Return ASGI middleware that logs a line per request, or exports its spans, or both, once its answer has ended."""

    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status = FAILED

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        record = RequestRecord(time.monotonic())
        token = RECORD.set(record)
        try:
            await app(scope, receive, send_noted)
        finally:
            RECORD.reset(token)
            facts = facts_of(scope, record, status=status)
            if writes_lines:
                log.info("%s %s %d", facts["method"], facts["route"], status, extra={"fields": facts})
            if exporter is not None and exporter.takes(parent := _parent(scope)):
                exporter.add([*spans_of(record, facts, parent=parent, model=model)])

    return recorded


def facts_of(scope: Scope, record: RequestRecord, *, status: int) -> dict[str, Any]:
    """Return what a log line says of a request; tokens and times only of one that reached the engine."""
    facts: dict[str, Any] = {
        "method": scope["method"],
        "route": getattr(scope.get("route"), "path", NO_ROUTE),
        "status": status,
        "duration_s": round(time.monotonic() - record.received_at, 6),
    }
    if record.choices:
        times = {"ttft_s": record.time_to_first_token_s, "queue_s": record.queue_s}
        facts |= {name: round(value, 6) for name, value in times.items() if not math.isnan(value)}
        facts |= {**record.tokens, "finish_reasons": record.finish_reasons}
    return facts


def spans_of(record: RequestRecord, facts: dict[str, Any], *, parent: Parent | None, model: str) -> Iterator[Span]:
    """Yield the span of a request, then those of the queue, prefill and decode of each choice."""
    offset = time.time() - time.monotonic()
    trace_id = new_trace_id() if parent is None else parent.trace_id
    attributes = {
        "http.request.method": facts["method"],
        "http.route": facts["route"],
        "http.response.status_code": facts["status"],
        "gen_ai.request.id": REQUEST_ID.get(),
        "gen_ai.request.model": model,
    }
    if record.choices:
        attributes |= {
            "gen_ai.usage.input_tokens": facts["prompt_tokens"],
            "gen_ai.usage.cached_input_tokens": facts["cached_tokens"],
            "gen_ai.usage.output_tokens": facts["output_tokens"],
            "gen_ai.response.finish_reasons": facts["finish_reasons"],
        }
    if "ttft_s" in facts:
        attributes["gen_ai.latency.time_to_first_token"] = facts["ttft_s"]
    root = Span(
        f"{facts['method']} {facts['route']}",
        record.received_at + offset,
        record.received_at + offset + facts["duration_s"],
        trace_id,
        parent_id="" if parent is None else parent.span_id,
        kind=SERVER,
        attributes=attributes,
        is_error=facts["status"] >= FAILED,
        state="" if parent is None else parent.state,
    )
    yield root
    for choice in record.choices:
        for name, start, end in _phases(choice, now=time.monotonic()):
            about = {"choice": choice.choice_index, "finish_reason": choice.finish.kind if choice.finish else RUNNING}
            yield Span(name, start + offset, end + offset, trace_id, parent_id=root.span_id, attributes=about)


def _phases(choice: Sequence, *, now: float) -> Iterator[tuple[str, float, float]]:
    """Yield the phases that a choice reached, with their monotonic times."""
    times = choice.times
    end = now if math.isnan(times.ended_at) else times.ended_at
    if times.started_at is None:
        yield "queue", times.accepted_at, end
        return
    yield "queue", times.accepted_at, times.started_at
    if math.isnan(times.first_token_at):
        yield "prefill", times.started_at, end
        return
    yield "prefill", times.started_at, times.first_token_at
    yield "decode", times.first_token_at, end


def _parent(scope: Scope) -> Parent | None:
    headers = dict(scope["headers"])
    texts = (headers.get(name, b"").decode("latin-1") for name in (b"traceparent", b"tracestate"))
    return parent_of(*texts)
