"""ASGI middleware before the routes: API keys, and limits on request bodies."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.observability.logs import REQUEST_ID, request_id_from
from rayserve_moe.serving.api.routes.pages import PAGES
from rayserve_moe.serving.api.routes.unsupported import UNSUPPORTED_CONTROL
from rayserve_moe.serving.errors import ANTHROPIC_PATH, ApiError, path_of

OPEN_PATHS = frozenset({"/health", "/ready", "/liveness", "/ping", "", *PAGES})
"""Paths without authentication: probes, which send no key, and empty pages. Nothing about requests or load. The empty
path is the bare prefix of the server, which leads to `/`."""
ADMIN_PATHS = frozenset(
    {
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/flush_cache",
        "/reset_prefix_cache",
        "/pause",
        "/resume",
        "/update_weights",
        "/update_weight_version",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/skyrl/v1/load_lora_adapter",
        "/begin_weight_update",
        "/end_weight_update",
        "/areal_update_weights",
        "/areal_pause_generation",
        "/areal_continue_generation",
        "/experts/placement",
        *UNSUPPORTED_CONTROL,
    }
)
"""Paths that change the answers of all clients: they need `admin_api_key` if it is set."""
TINKER_PATH = "/api/v1/"
"""Prefix of Tinker's paths."""
_DISCARDED_BODIES = 4
"""Multiple of the limit up to which rejected bodies are read: a client that still writes cannot read the answer."""
BODY_TIMEOUT_S = 120.0
"""Maximum time for a body to arrive: meanwhile it counts against the open requests that Serve allows."""

STREAMED_PATHS = frozenset({"/update_weights_from_tensor"})
"""Paths with long bodies: the timeout applies to each part, and MAX_STREAMED_BYTES bounds the total."""
MAX_STREAMED_BYTES = 4 << 30


def has_admin_key(server: ServerSettings, authorization: str) -> bool:
    """Return True if an authorization header permits changes for all clients; always True without an admin key."""
    return not server.admin_api_key or _is_bearer(authorization.encode("latin-1"), server.admin_api_key)


def refused_key() -> ApiError:
    """Return the error for a missing or wrong key."""
    return ApiError(401, "missing or wrong API key: send it as a bearer token", code="invalid_api_key")


def _is_bearer(authorization: bytes, key: str) -> bool:
    scheme, _, token = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key.encode())


def guard_edge(app: ASGIApp, server: ServerSettings, *, body_timeout_s: float = BODY_TIMEOUT_S) -> ASGIApp:
    """Return ASGI middleware that rejects a missing key (401), a body over the limit (413), and a late body (408)."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        REQUEST_ID.set(request_id_from(headers.get(b"x-request-id", b"")))
        path = path_of(scope)
        is_streamed = path in STREAMED_PATHS
        max_bytes = MAX_STREAMED_BYTES if is_streamed else server.max_body_bytes
        length = headers.get(b"content-length", b"")
        key = headers.get(b"authorization", b"")
        if not key and path.startswith((ANTHROPIC_PATH, TINKER_PATH)):  # whose clients send the key in x-api-key
            key = b"Bearer " + headers.get(b"x-api-key", b"")
        if not _is_allowed(server, path, key):
            await refused_key().response(path)(scope, receive, send)
        elif length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
            await _discard(receive, max_bytes, body_timeout_s)
            await _too_large(max_bytes).response(path)(scope, receive, send)
        else:
            await app(scope, _limited(receive, max_bytes, body_timeout_s, is_streamed=is_streamed), send)

    return guarded


def _is_allowed(server: ServerSettings, path: str, authorization: bytes) -> bool:
    if path in ADMIN_PATHS and server.admin_api_key:
        return _is_bearer(authorization, server.admin_api_key)
    if not server.api_key or path in OPEN_PATHS:
        return True
    return any(_is_bearer(authorization, key) for key in (server.api_key, server.admin_api_key) if key)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is longer than {max_bytes} bytes", code="body_too_large")


def _limited(receive: Receive, max_bytes: int, timeout_s: float, *, is_streamed: bool) -> Receive:
    """Limit the bytes and the time of a body as it arrives; the time of a streamed body is per part.

    Chunked bodies declare no length, so the bytes are counted.
    """
    num_bytes = 0
    deadline: float | None = asyncio.get_running_loop().time() + timeout_s

    async def receive_limited() -> Message:
        nonlocal num_bytes, deadline
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, "the request body did not arrive in time", code="request_timeout") from None
        if not message.get("more_body", False):
            deadline = None  # only the client's disconnect may follow
        elif is_streamed:
            deadline = asyncio.get_running_loop().time() + timeout_s
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            if message.get("more_body", False):
                await _discard(receive, max_bytes, timeout_s)
            raise _too_large(max_bytes)
        return message

    return receive_limited


async def _discard(receive: Receive, max_bytes: int, timeout_s: float) -> None:
    """Read a rejected body to its end, within limits."""
    remaining = _DISCARDED_BODIES * max_bytes
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while remaining > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                remaining -= len(message.get("body", b""))
