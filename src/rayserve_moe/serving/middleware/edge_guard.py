"""What a request must pass before a route sees it: the API keys, and the limit on its body.

Plain ASGI, so that streamed answers pass through untouched.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.observability.logs import REQUEST_ID, request_id_from
from rayserve_moe.serving.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/experts"})
"""What is answered without a key: nothing there tells of requests or their numbers."""
ADMIN_PATHS = frozenset(
    {
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/flush_cache",
        "/reset_prefix_cache",
    }
)
"""What changes the answers of all clients: it asks for `admin_api_key`, where there is one."""
_DISCARDED_BODIES = 4
"""Refused bodies are read on, up to this many limits: a client still writing cannot read our answer."""
BODY_TIMEOUT_S = 120.0
"""For a body to arrive in: until then it holds one of the places that Serve has for requests."""


def has_admin_key(server: ServerSettings, authorization: str) -> bool:
    """Whether a request may do what concerns all clients, by its header; where there is no such key, it may."""
    return not server.admin_api_key or _is_bearer(authorization.encode("latin-1"), server.admin_api_key)


def refused_key() -> ApiError:
    """The answer to a request without the key that it needs."""
    return ApiError(401, "missing or wrong API key: send it as a bearer token", code="invalid_api_key")


def _is_bearer(authorization: bytes, key: str) -> bool:
    scheme, _, token = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key.encode())


class EdgeGuard:
    """ASGI wrapper that refuses a missing key (401), a body over the limit (413), and one that does not come (408)."""

    def __init__(self, app: ASGIApp, server: ServerSettings, *, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app, self._server = app, server
        self._body_timeout_s = body_timeout_s
        self._max_bytes = server.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        REQUEST_ID.set(request_id_from(headers.get(b"x-request-id", b"")))
        if not self._is_allowed(scope, headers.get(b"authorization", b"")):
            await refused_key().response()(scope, receive, send)
        elif self._is_too_long(headers.get(b"content-length", b"")):
            await self._discard(receive)
            await self._too_large().response()(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    def _is_allowed(self, scope: Scope, authorization: bytes) -> bool:
        server, path = self._server, scope["path"].removeprefix(scope.get("root_path", ""))
        if path in ADMIN_PATHS and server.admin_api_key:
            return _is_bearer(authorization, server.admin_api_key)
        if not server.api_key or path in OPEN_PATHS:
            return True
        return any(_is_bearer(authorization, key) for key in (server.api_key, server.admin_api_key) if key)

    def _is_too_long(self, content_length: bytes) -> bool:
        return content_length.isdigit() and (len(content_length) > 18 or int(content_length) > self._max_bytes)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request body is longer than {self._max_bytes} bytes", code="body_too_large")

    def _counted(self, receive: Receive) -> Receive:
        """Count what arrives, and wait for it only so long: a chunked body announces no length."""
        num_bytes = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._body_timeout_s

        async def receive_counted() -> Message:
            nonlocal num_bytes, deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the request body did not arrive in time", code="request_timeout") from None
            if not message.get("more_body", False):
                deadline = None  # what may follow is the client's leaving
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                if message.get("more_body", False):
                    await self._discard(receive)
                raise self._too_large()
            return message

        return receive_counted

    async def _discard(self, receive: Receive) -> None:
        """Read a refused body to its end, or for as long as one may take to arrive."""
        remaining = _DISCARDED_BODIES * self._max_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self._body_timeout_s):
                while remaining > 0:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    remaining -= len(message.get("body", b""))
