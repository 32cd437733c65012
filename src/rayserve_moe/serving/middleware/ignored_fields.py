"""Names at the top level of bodies that nobody knows: they are ignored, logged once, and listed in the answer's header.

Plain ASGI, so that streamed answers carry the header too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-ignored-fields"

_log = logging.getLogger(__name__)
_MAX_REMEMBERED = 1024
_MAX_LISTED = 16
_LONGEST_NAME = 64
_KEY = "rayserve_moe.ignored_fields"


class IgnoredFields:
    """Notes the names of one application's requests: each is logged once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, request: Request, names: Sequence[str]) -> None:
        """Have the answer to `request` list them; log those that are new, only so many: clients choose them."""
        if names:
            request.scope[_KEY] = names
        for name in names:
            if name not in self._seen and len(self._seen) < _MAX_REMEMBERED:
                self._seen.add(name)
                _log.warning("ignoring request field %s, which is not known", ascii(name[:_LONGEST_NAME]))


def listed(names: Sequence[str]) -> str:
    """Return the header's value: names in percent-encoded ASCII and cut to a length, then how many more there are."""
    told = [quote(name[:_LONGEST_NAME], safe="")[:_LONGEST_NAME] for name in names[:_MAX_LISTED]]
    more = len(names) - len(told)
    return ", ".join([*told, f"+{more}"] if more else told)


class IgnoredFieldsHeader:
    """ASGI wrapper that puts the header on answers to requests with noted names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_listing(message: Message) -> None:
            if message["type"] == "http.response.start" and (names := scope.get(_KEY)):
                headers = [*message["headers"], (HEADER.encode(), listed(names).encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_listing if scope["type"] == "http" else send)
