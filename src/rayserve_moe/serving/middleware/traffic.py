"""Which requests are under way, and the end of them: a server that drains takes no new ones and lets these end."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from rayserve_moe.serving.errors import ApiError


class Traffic:
    """Requests under way at the HTTP edge, until the last byte of their answers, and whether more may come."""

    def __init__(self) -> None:
        self.num_open = 0
        self.is_draining = False

    def drain(self) -> None:
        """Take no new work from now on."""
        self.is_draining = True

    async def refuse_when_draining(self) -> None:
        """Raise a 503 for work that comes too late; what controls the server goes on.

        A coroutine, since FastAPI calls what is none on a thread.
        """
        if self.is_draining:
            raise ApiError(503, "the server is shutting down: send this to another one", code="draining")


class CountedTraffic:
    """ASGI wrapper that counts the requests under way."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._traffic.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._traffic.num_open -= 1
