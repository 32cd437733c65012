"""A lean client in a process of its own: many `/v1/completions` streams at once. A JSON line asks, a JSON line answers.

    python -m benchmarks.stream_client HOST PORT
    {"prompts": [[id, ...], ...], "num_new_tokens": 128, "name": ""}     a name makes `rid`s, which a journal keeps
        -> {"seconds": 6.6, "first_token_s": [0.4, ...], "num_new_tokens": 2048, "num_events": 900, "client_cpu_s": 0.1}

It parses no event but the last, which counts tokens. Bodies are ready before the clock starts; connecting is inside.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

EVENT, END = b"data: ", b"data: [DONE]"


@dataclass
class Received:
    """What one stream has brought: when its first event came, how many came, and the token count of the last."""

    first_event_at: float = 0.0
    num_events: int = 0
    num_new_tokens: int = 0
    _before_last: bytes = field(default=b"", repr=False)

    def take(self, event: bytes, *, now: float) -> None:
        """Take in one event. RuntimeError for one that is an error."""
        if event.startswith(END):
            self.num_new_tokens = json.loads(self._before_last[len(EVENT) :])["usage"]["completion_tokens"]
            return
        if event.startswith(b'data: {"error"'):
            raise RuntimeError(event.decode("utf-8", "replace"))
        if self.num_events == 0:
            self.first_event_at = now
        self.num_events += 1
        self._before_last = event


async def events_of(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the events of a chunked HTTP/1.1 answer. RuntimeError for any other status than 200."""
    status, *_ = (await answer.readuntil(b"\r\n\r\n")).split(b"\r\n")
    if b" 200 " not in status + b" ":
        raise RuntimeError(f"the server answered {status.decode()}: {(await answer.read(500)).decode()}")
    rest = b""
    while size := int(await answer.readline(), 16):
        *events, rest = (rest + (await answer.readexactly(size + 2))[:-2]).split(b"\n\n")
        for event in events:
            yield event[event.index(EVENT) :] if event.startswith(b"id: ") else event


def request_of(prompt: list[int], num_new_tokens: int, *, host: str, rid: str = "") -> bytes:
    """Return a whole HTTP request for a greedy stream that ends with token counts, and closes its connection."""
    body = {
        "prompt": prompt,
        "max_tokens": num_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"rid": rid} if rid else {}),
    }
    encoded = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


async def read_stream(address: tuple[str, int], request: bytes) -> Received:
    """Send one request and read its stream to the end."""
    reader, writer = await asyncio.open_connection(*address)
    received = Received()
    try:
        writer.write(request)
        async for event in events_of(reader):
            received.take(event, now=time.perf_counter())
    finally:
        writer.close()
    return received


async def run(
    address: tuple[str, int], prompts: list[list[int]], *, num_new_tokens: int, name: str = ""
) -> dict[str, Any]:
    """Stream all prompts at once."""
    rids = [f"{name} {place}" if name else "" for place in range(len(prompts))]
    each = zip(prompts, rids, strict=True)
    requests = [request_of(prompt, num_new_tokens, host=address[0], rid=rid) for prompt, rid in each]
    started, cpu_before = time.perf_counter(), time.process_time()
    streams = await asyncio.gather(*(read_stream(address, request) for request in requests))
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "first_token_s": [stream.first_event_at - started for stream in streams],
        "num_new_tokens": sum(stream.num_new_tokens for stream in streams),
        "num_events": sum(stream.num_events for stream in streams),
        "client_cpu_s": time.process_time() - cpu_before,
    }


def main() -> None:
    """Serve runs until the input ends."""
    address = (sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asyncio.run(run(address, **asked))), flush=True)


if __name__ == "__main__":
    main()
