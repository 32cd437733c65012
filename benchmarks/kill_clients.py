"""Clients that a fault may hit: each ends with one word for what it saw. Plain asyncio, one connection per request."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.serve_process import HOST

COMPLETED, ERROR_EVENT, RESET, HANG = "completed", "error event", "reset", "hang"
DONE = b"data: [DONE]"


@dataclass(frozen=True)
class Seen:
    """What one client saw: a word (or the status that refused it), when it asked and when it was over, in seconds."""

    kind: str
    asked_at: float
    ended_at: float
    retry_after: bool = False

    @property
    def is_served(self) -> bool:
        return self.kind == COMPLETED


async def completion(
    port: int, *, max_tokens: int, streams: bool, limit_s: float, first: asyncio.Event | None = None, rid: str = ""
) -> Seen:
    """Ask for a completion of `max_tokens` tokens; `first` is set by the first event of a stream, a journal keeps it
    under a `rid`."""
    body: dict[str, Any] = {
        "prompt": "37+45=",
        "max_tokens": max_tokens,
        "temperature": 1,
        "ignore_eos": True,
        "stream": streams,
    }
    if rid:
        body["rid"] = rid
    return await _ask(port, "POST", path="/v1/completions", body=body, limit_s=limit_s, first=first)


async def health(port: int, *, limit_s: float) -> Seen:
    """Ask `/health`."""
    return await _ask(port, "GET", path="/health", body=None, limit_s=limit_s, first=None)


async def _ask(
    port: int, method: str, *, path: str, body: dict[str, Any] | None, limit_s: float, first: asyncio.Event | None
) -> Seen:
    encoded = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    )
    asked_at, retry_after = time.monotonic(), False
    try:
        async with asyncio.timeout(limit_s):
            kind, retry_after = await _exchange(port, head.encode() + encoded, first=first)
    except TimeoutError:
        kind = HANG
    except (OSError, EOFError, ValueError):
        kind = RESET
    return Seen(kind, asked_at, time.monotonic(), retry_after)


async def _exchange(port: int, request: bytes, *, first: asyncio.Event | None) -> tuple[str, bool]:
    """Send the request; returns what came back, and whether it says when to try again."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = head.split(b" ", 2)[1].decode()
        body = await _chunked(reader, first) if b"chunked" in head else await _counted(reader, head)
    finally:
        writer.close()
    if status != "200":
        is_ours = body.startswith(b'{"error"')
        return status if is_ours else f"bare {status}", b"\r\nretry-after:" in head
    if b'data: {"error"' in body:
        return ERROR_EVENT, False
    if b"text/event-stream" in head and not body.rstrip().endswith(DONE):
        return RESET, False
    return COMPLETED, False


async def _chunked(reader: asyncio.StreamReader, first: asyncio.Event | None) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
        if first is not None:
            first.set()
    return body


async def _counted(reader: asyncio.StreamReader, head: bytes) -> bytes:
    length = next((line for line in head.split(b"\r\n") if line.startswith(b"content-length:")), None)
    return await (reader.read() if length is None else reader.readexactly(int(length.partition(b":")[2])))
