"""A body has so long to arrive; what is answered to a whole one may take longer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import StreamingResponse

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.errors import install_error_handlers
from rayserve_moe.serving.middleware.edge_guard import guard_edge
from tests.support.serving.http_server import running

BODY_TIMEOUT_S = 1.5
DEADLINE_S = 60.0
MAX_BYTES = 1000
BUCKETS = "/update_weights_from_tensor"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = FastAPI()
    install_error_handlers(app)
    app.add_middleware(guard_edge, server=ServerSettings(max_body_bytes=MAX_BYTES), body_timeout_s=BODY_TIMEOUT_S)

    async def slowly(body: bytes) -> AsyncIterator[bytes]:
        yield body
        await asyncio.sleep(2 * BODY_TIMEOUT_S)
        yield body

    @app.post(BUCKETS)
    @app.post("/")
    async def answer(request: Request) -> StreamingResponse:
        return StreamingResponse(slowly(await request.body()))

    with running(app) as address:
        yield address


def sent(url: str, framing: bytes, *, path: str = "/") -> bytes:
    """What is answered to the beginning of a request, up to the end of its connection."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=DEADLINE_S) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode() + framing)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 10\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"]
)
def test_half_a_body_is_given_up(framing: bytes, url: str) -> None:
    answer = sent(url, framing)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer


@pytest.mark.parametrize(
    "framing",
    [
        f"Content-Length: {10 * MAX_BYTES}\r\n\r\nhalf".encode(),
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (MAX_BYTES + 1, b"x" * (MAX_BYTES + 1)),
    ],
    ids=["announced", "chunked"],
)
def test_half_a_body_that_is_too_long_is_not_waited_for_either(framing: bytes, url: str) -> None:
    """It is read on, so that its client can read the answer, but holds its place no longer than others."""
    assert sent(url, framing).startswith(b"HTTP/1.1 413 ")


def test_a_whole_body_is_answered_for_as_long_as_it_takes(url: str) -> None:
    assert httpx.post(url, content=b"whole", timeout=DEADLINE_S).text == "wholewhole"


def test_a_bucket_of_weights_has_that_long_for_each_part_of_it(url: str) -> None:
    """However long it is; one that stops half-way is given up."""

    def parts() -> Iterator[bytes]:
        for _ in range(8):
            time.sleep(BODY_TIMEOUT_S / 5)
            yield b"x" * MAX_BYTES

    answer = httpx.post(url + BUCKETS, content=parts(), timeout=DEADLINE_S)
    assert answer.status_code == 200 and len(answer.content) == 2 * 8 * MAX_BYTES
    assert sent(url, b"Content-Length: 10\r\n\r\nhalf", path=BUCKETS).startswith(b"HTTP/1.1 408 ")
