"""What the kill table counts is what its clients saw."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.kill_clients import COMPLETED, ERROR_EVENT, HANG, RESET, Seen, completion
from benchmarks.kill_table import served_after, table_of

OK, STREAM = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = STREAM + "Transfer-Encoding: chunked\r\n\r\n"
ERROR = '{"error": {}}'


def chunks(*texts: str) -> str:
    return CHUNKED + "".join(f"{len(text):x}\r\n{text}\r\n" for text in texts)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (OK, COMPLETED),
        (chunks("data: {}\n\n", "data: [DONE]\n\n", ""), COMPLETED),
        (chunks("data: {}\n\n", f"data: {ERROR}\n\n", "data: [DONE]\n\n", ""), ERROR_EVENT),
        (chunks("data: {}\n\n", ""), RESET),
        (chunks("data: {}\n\n"), RESET),
        ("", RESET),
        (f"HTTP/1.1 503 Gone\r\nRetry-After: 5\r\nContent-Length: {len(ERROR)}\r\n\r\n{ERROR}", "503"),
        ("HTTP/1.1 500 Internal\r\nContent-Length: 3\r\n\r\nbad", "bare 500"),
        (None, HANG),
    ],
)
def test_a_client_says_what_it_saw(answer: str | None, kind: str) -> None:
    seen = asyncio.run(asked(answer, limit_s=0.2 if answer is None else 60))
    assert seen.kind == kind
    assert seen.retry_after == (kind == "503")


async def asked(answer: str | None, *, limit_s: float) -> Seen:
    """Ask a server that answers so, or not before its client gives up."""
    has_ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        writer.write((answer or "").encode())
        writer.close()
        await writer.wait_closed()
        has_ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        seen = await completion(port, max_tokens=1, streams=True, limit_s=limit_s)
        await has_ended.wait()
    return seen


@pytest.mark.parametrize(
    ("probes", "seconds"),
    [
        ([(COMPLETED, 1, 2)], 0.0),
        ([("503", 1, 2), (COMPLETED, 3, 4), ("503", 5, 6), (COMPLETED, 7, 9), (COMPLETED, 8, 8.5)], 8.5),
        ([(HANG, 1, 10), (COMPLETED, 2, 11)], 11.0),
        ([(COMPLETED, 1, 2), ("503", 3, 4)], None),
    ],
)
def test_served_again_is_after_the_last_failure(probes: list[tuple[str, float, float]], seconds: float | None) -> None:
    assert served_after([Seen(*probe) for probe in probes], 0.0) == seconds


def test_the_table_has_a_row_per_fault() -> None:
    row = {"served_after_s": None, "streams": {"reset": 16}, "plain": {}, "probes": {"503": 2}, "health": {"503": 1}}
    text = table_of({"worker killed, 1 host": {**row, "slowest_health_s": 0.25}})
    assert "| worker killed, 1 host | never" in text and "16 reset" in text
