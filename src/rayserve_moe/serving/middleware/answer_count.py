"""Counts answers by route and status, as the client gets them. Plain ASGI, so that streams pass through untouched."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_ROUTE = "none"
"""What is counted of paths that no route has, and of what is refused before: clients choose paths."""


class AnswerCount:
    """ASGI wrapper that adds to `answered` by path of the route and status."""

    def __init__(self, app: ASGIApp, answered: Counter[tuple[str, int]]) -> None:
        self._app, self._answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", NO_ROUTE)
                self._answered[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, send_counted if scope["type"] == "http" else send)
