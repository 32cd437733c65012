"""HTTP responses from the streams of a request: a JSON object, server-sent events, or a rollout container.

Small answers are serialized on the event loop, large ones on a thread.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.engine.recovery.hosts import progress_of
from rayserve_moe.replay.encoding import ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE, encode_rollout
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.accepted_types import accepted_types
from rayserve_moe.serving.api.answers.request_streams import RequestStreams
from rayserve_moe.serving.api.answers.routing import RoutingWriter
from rayserve_moe.serving.api.answers.streaming import EventStream, to_json, while_connected
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError

LARGE_ANSWER_BYTES = 65536
_BYTES_PER_TOKEN = 64
_Built = TypeVar("_Built")


class Writer(ABC):
    """Writer of the answer to a request in a dialect."""

    has_types: ClassVar[bool] = False
    """True if events are named after their types."""
    routing: RoutingWriter
    """Writer of routing fields; it holds the rows that a container sends as bytes."""

    @abstractmethod
    def whole(self, results: Sequence[ChoiceResult]) -> dict | list:
        """Return the answer of a request that does not stream."""

    @abstractmethod
    def chunks(self, choice: int, so_far: ChoiceResult, *, delta: ChoiceResult) -> list[dict]:
        """Return the events for new output of a choice, possibly none; `so_far` holds no routing."""

    def defers(self, delta: ChoiceResult) -> bool:
        """Return True if an event about a choice must wait for more output."""
        return False

    def closing(self, results: Sequence[ChoiceResult]) -> list[dict]:
        """Return the events after the last choice's, if any."""
        return []


def rollout_type(request: Request, *, stream: bool) -> str | None:
    """Return the container type that `Accept` prefers, or None.

    Raises: ApiError if `stream` is set, because events are text.
    """
    containers = (ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE)
    found = next((kind for kind in accepted_types(request) if kind in containers), None)
    if found and stream:
        raise ApiError(400, "a stream cannot be answered in the rollout media type: leave out one of the two")
    return found


async def respond(
    state: ApiState,
    request: Request,
    *,
    streams: RequestStreams,
    writer: Writer,
    stream: bool,
    container: str | None = None,
) -> Response:
    """Return events, or wait for the whole answer: JSON, or a container of this media type.

    A container has the JSON fields as its header, followed by the routing rows; the answers of a batch are listed under
    `answers`. The requests are aborted when the client disconnects.
    """
    if stream:
        events, pause = _events(state, streams, writer), _pause_of(state)
        return EventStream(events, streams.close, has_types=writer.has_types, pause=pause, cursor=streams)

    def serialized() -> bytes:
        answer = writer.whole(results)
        if container is None:
            return to_json(answer)
        header = {"answers": answer} if isinstance(answer, list) else answer
        compress = container == ROLLOUT_ZSTD_MEDIA_TYPE
        routing = writer.routing
        return encode_rollout(header, routing.raw_rows, arrays=routing.arrays, compress=compress, to_json=to_json)

    try:
        results = await while_connected(request.receive, streams.results())
        body = await built(state, serialized, size=size_of(results))
        return Response(body, media_type=container or "application/json")
    finally:
        streams.close()


def _pause_of(state: ApiState) -> Callable[[], str | None]:
    def pause() -> str | None:
        progress = progress_of(state.loop.recovery)
        return None if progress is None else f"hosts are being replaced: {progress.phase}"

    return pause


async def _events(state: ApiState, streams: RequestStreams, writer: Writer) -> AsyncGenerator[bytes, None]:
    results = [ChoiceResult() for _ in streams.request_of_choice]
    pending: dict[int, ChoiceResult] = {}
    resumed_from = streams.told.copy() if streams.kept is None else streams.kept.told
    streams.told = list(resumed_from)
    async for arrived in streams.groups():
        for group in [[each] for each in arrived] if any(resumed_from) else [arrived]:
            for choice, delta in group:
                results[choice].add(replace(delta, routing=None))
                pending.setdefault(choice, ChoiceResult()).add(delta)
            for choice in dict.fromkeys(choice for choice, _ in group):
                if writer.defers(pending[choice]):
                    continue
                delta = pending.pop(choice)
                write = partial(_written, writer, choice, results[choice], delta)
                events = await built(state, write, size=size_of([delta]))
                told = len(results[choice].token_ids) + (results[choice].finish is not None)
                for place, event in enumerate(events if told > resumed_from[choice] else [], 1):
                    streams.told[choice] = told if place == len(events) else streams.told[choice]
                    yield event
    for event in writer.closing(results):
        yield to_json(event)


def _written(writer: Writer, choice: int, so_far: ChoiceResult, delta: ChoiceResult) -> list[bytes]:
    return list(map(to_json, writer.chunks(choice, so_far, delta=delta)))


def size_of(results: Iterable[ChoiceResult]) -> int:
    """Estimate the bytes of an answer."""
    size = 0
    for result in results:
        num_values = len(result.token_ids)
        for values in (*result.columns.values(), *(() if result.prompt is None else result.prompt.columns.values())):
            num_values += values.size
        size += num_values * _BYTES_PER_TOKEN + (0 if result.routing is None else result.routing.num_bytes)
    return size


async def built(state: ApiState, build: Callable[[], _Built], *, size: int) -> _Built:
    """Run `build`, which returns about `size` bytes: here, or on a thread of `state.encoding` if that takes long."""
    if size < LARGE_ANSWER_BYTES:
        return build()
    return await asyncio.get_running_loop().run_in_executor(state.encoding, build)
