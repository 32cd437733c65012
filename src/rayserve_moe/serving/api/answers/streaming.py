"""JSON and server-sent events; work is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import pydantic_core
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.serving.errors import ApiError, as_api_error

NOT_FINITE = (b"NaN", b"Infinity")
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}
"""Line separators for clients that split text into lines; JSON does not escape them."""

COMMENT_EVERY_S = 3.0

Result = TypeVar("Result")


def to_json(answer: dict | list) -> bytes:
    """Return compact JSON.

    Raises: ValueError for a float that is not finite, which would be a bug.
    """
    body = pydantic_core.to_json(answer)
    if any(name in body for name in NOT_FINITE):
        json.dumps(answer, allow_nan=False)  # raises for numbers, not for text
    return body


def json_answer(answer: dict | list, *, status: int = 200) -> Response:
    """Return a compact JSON response."""
    return Response(to_json(answer), status, media_type="application/json")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end, or cancel it and raise ClientDisconnect when the client disconnects.

    The request body must have been read: `receive` then waits for the disconnect.
    """
    working = asyncio.create_task(work)
    disconnected = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class Cursor(Protocol):
    """Client state after every event; `cursor` is None if the stream cannot be resumed."""

    @property
    def cursor(self) -> str | None: ...


class EventStream(StreamingResponse):
    """Server-sent events, each a JSON object in bytes, then `[DONE]`; typed events omit the latter.

    The `id` of an event is the `cursor` at that time. An error becomes an event. While `pause` returns a reason, a
    periodic comment keeps proxies from closing the stream. `close` is always called: after the last event, and when the
    client disconnects, even before the first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        *,
        has_types: bool = False,
        pause: Callable[[], str | None] = lambda: None,
        cursor: Cursor | None = None,
    ) -> None:
        self._close, self._pause = close, pause
        self._is_open = False
        self._lines = self._opened(_event_lines(events, has_types, cursor))
        super().__init__(self._lines, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        commenting = asyncio.create_task(self._comment(send))
        try:
            await while_connected(receive, self.stream_response(send))
        except (ClientDisconnect, OSError):
            return
        finally:
            commenting.cancel()
            self._close()
            await self._lines.aclose()

    async def _opened(self, lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Yield the lines; the first is requested only after the answer has begun."""
        self._is_open = True
        try:
            async for line in lines:
                yield line
        finally:
            self._is_open = False
            await lines.aclose()

    async def _comment(self, send: Send) -> None:
        with suppress(OSError):
            while True:
                await asyncio.sleep(COMMENT_EVERY_S)
                if self._is_open and (reason := self._pause()) is not None:
                    body = f": {reason}\n\n".encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _event_lines(
    events: AsyncGenerator[bytes, None], has_types: bool, cursor: Cursor | None
) -> AsyncGenerator[bytes, None]:
    line = typed_line if has_types else event_line
    try:
        async for event in events:
            known = None if cursor is None else cursor.cursor
            yield line(event) if known is None else f"id: {known}\n".encode() + line(event)
    except (ApiError, EngineStoppedError) as error:
        told = as_api_error(error).body()
        typed = {"type": "error"}
        yield line(to_json(typed | told["error"] | told | typed if has_types else told))
    finally:
        await events.aclose()
    if not has_types:
        yield event_line(b"[DONE]")


def typed_line(json_text: bytes) -> bytes:
    """Return the event of an object whose first field is its type, which names the event."""
    return b"event: " + json_text.split(b'"', 4)[3] + b"\n" + event_line(json_text)


def event_line(json_text: bytes) -> bytes:
    """Return the event of a JSON text as a single line under every client's line separators."""
    if not json_text.isascii():
        for end, escape in _LINE_ENDS.items():
            json_text = json_text.replace(end, escape)
    return b"data: " + json_text + b"\n\n"
