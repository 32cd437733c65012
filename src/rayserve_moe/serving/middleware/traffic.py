"""Counters of requests in progress and of answers; a draining server rejects new requests."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_moe.serving.errors import ApiError

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
