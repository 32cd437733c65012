"""From the streams of a request to the HTTP response, whole or as events: the same way for every dialect.

Answers are built and serialized on the event loop while they are small, in a thread where they are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.requests import ChoiceResult
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.responses.request_streams import RequestStreams
from rayserve_moe.serving.responses.streaming import EventStream, to_json, while_connected

LARGE_ANSWER_BYTES = 65536
_BYTES_PER_TOKEN = 64


class Writer(Protocol):
    """One dialect's way to write the answer to one request."""

    def whole(self, results: Sequence[ChoiceResult]) -> dict | list:
        """Return the answer of a request that does not stream."""
        ...

    def waits_for(self, news: ChoiceResult) -> bool:
        """Whether an event about one choice has to wait until more has come."""
        ...

    def chunk(self, choice: int, so_far: ChoiceResult, *, news: ChoiceResult) -> dict:
        """Return the event about what is new to one choice; routing is in `news` only."""
        ...

    def closing(self, results: Sequence[ChoiceResult]) -> dict | None:
        """Return the event after the last choice's, if there is one."""
        ...


async def respond(
    state: ApiState,
    request: Request,
    *,
    streams: RequestStreams,
    writer: Writer,
    to_body: Callable[[dict | list], bytes] = to_json,
    media_type: str = "application/json",
) -> Response:
    """Wait for the whole answer, or give up with the client."""
    try:
        results = await while_connected(request.receive, streams.results())
        body = await built(state, lambda: to_body(writer.whole(results)), size=size_of(results))
        return Response(body, media_type=media_type)
    finally:
        streams.close()


def respond_in_events(state: ApiState, streams: RequestStreams, *, writer: Writer) -> Response:
    """Answer with one event per choice whenever there is news of it."""
    return EventStream(_events(state, streams, writer), streams.close)


async def _events(state: ApiState, streams: RequestStreams, writer: Writer) -> AsyncGenerator[bytes, None]:
    results = [ChoiceResult() for _ in streams.request_of_choice]
    waiting: dict[int, ChoiceResult] = {}
    async for group in streams.groups():
        for choice, delta in group:
            results[choice].add(replace(delta, routing=None))
            waiting.setdefault(choice, ChoiceResult()).add(delta)
        for choice in dict.fromkeys(choice for choice, _ in group):
            if writer.waits_for(waiting[choice]):
                continue
            news = waiting.pop(choice)
            yield await built(state, partial(_chunk, writer, choice, results[choice], news), size=size_of([news]))
    closing = writer.closing(results)
    if closing is not None:
        yield to_json(closing)


def _chunk(writer: Writer, choice: int, so_far: ChoiceResult, news: ChoiceResult) -> bytes:
    return to_json(writer.chunk(choice, so_far, news=news))


def size_of(results: Iterable[ChoiceResult]) -> int:
    """Guess how many bytes an answer will have."""
    size = 0
    for result in results:
        num_told = len(result.token_ids) + (0 if result.top is None else result.top.logprobs.size)
        if (scores := result.prompt_scores) is not None:
            num_told += scores.logprobs.size + (0 if scores.top is None else scores.top.logprobs.size)
        size += num_told * _BYTES_PER_TOKEN + (0 if result.routing is None else result.routing.rows.nbytes)
    return size


async def built(state: ApiState, build: Callable[[], bytes], *, size: int) -> bytes:
    """Build a body of about `size` bytes: here, or in a thread that large ones are built in."""
    if size < LARGE_ANSWER_BYTES:
        return build()
    return await asyncio.get_running_loop().run_in_executor(state.encoding, build)
