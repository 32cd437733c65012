"""Unknown top-level fields of request bodies: ignored, logged once, and listed in a response header."""

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
_MAX_NAME_LENGTH = 64
_KEY = "rayserve_moe.ignored_fields"


def note_ignored(request: Request, names: Sequence[str]) -> None:
    """List these names in the answer to `request`."""
    request.scope[_KEY] = names


def ignored_in(request: Request) -> Sequence[str]:
    """Return the names that were noted for `request`."""
    return request.scope.get(_KEY, ())


def listed(names: Sequence[str]) -> str:
    """Return the header's value: percent-encoded, truncated names, then the number of omitted names."""
    quoted = [quote(name[:_MAX_NAME_LENGTH], safe="")[:_MAX_NAME_LENGTH] for name in names[:_MAX_LISTED]]
    more = len(names) - len(quoted)
    return ", ".join([*quoted, f"+{more}"] if more else quoted)


def list_ignored_fields(app: ASGIApp) -> ASGIApp:
    """Return ASGI middleware that adds the header and logs each name once, bounded because clients choose names."""
    seen: set[str] = set()

    async def listing(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_listing(message: Message) -> None:
            if message["type"] == "http.response.start" and (names := scope.get(_KEY)):
                headers = [*message["headers"], (HEADER.encode(), listed(names).encode())]
                message = {**message, "headers": headers}
                for name in names:
                    if name not in seen and len(seen) < _MAX_REMEMBERED:
                        seen.add(name)
                        _log.warning("ignoring request field %s, which is not known", ascii(name[:_MAX_NAME_LENGTH]))
            await send(message)

        await app(scope, receive, send_listing)

    return listing
