"""Engine requests of an HTTP request: submitted, merged into a single stream of updates, and closed together.

Choices are numbered over the whole HTTP request: by prompt, and within a prompt by the engine's index.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.types import Scope

from rayserve_moe.answers.streams import GenerationStream, Keeper
from rayserve_moe.engine.adapters import UnknownAdapterError
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.engine.control import keyed
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, RequestError
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.schemas.field_types import MAX_CHOICES
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.journalling import HANDED_OVER, TAKEN_OVER, KeptRequest, asking_of, kept_request
from rayserve_moe.serving.retention_hints import retention_of
from rayserve_moe.serving.session_identity import session_key, session_name
from rayserve_moe.text.request_limits import with_thinking_limit

NumberedDelta = tuple[int, ChoiceResult]
_Item = TypeVar("_Item")
_QUOTED = re.compile(r"`(\w+)`")
CHOICES_AT_ONCE = 64
"""Choices opened before other tasks of the event loop run: about two milliseconds."""


class RequestStreams:
    """Open streams of an HTTP request. `close` must follow, however the request ends."""

    def __init__(self, state: ApiState, requests: Sequence[GenerationRequest]) -> None:
        self._started_s = time.monotonic()
        self._loop, self._tokenizer = state.loop, state.tokenizer
        self.request_of_choice = [request for request in requests for _ in range(request.sampling.n)]
        if len(self.request_of_choice) > MAX_CHOICES:
            raise ApiError(400, f"a request may ask for at most {MAX_CHOICES} choices, prompts times `n`", param="n")
        self.elapsed_s = [0.0] * len(self.request_of_choice)
        """Seconds from the request to the last delta of each choice."""
        self._first_choice = [0, *itertools.accumulate(request.sampling.n for request in requests)]
        self._tasks: list[asyncio.Task[None]] = []
        self._all_ended: asyncio.Future[list] | None = None
        self._streams: list[GenerationStream] = []
        self.kept: KeptRequest | None = None
        self.retired: FinishReason | None = None
        self.told = [0] * len(self.request_of_choice)
        """Tokens of each choice in sent events; its end counts as a token."""

    @property
    def cursor(self) -> str | None:
        """Return the client's state of every choice, as an event id; None if events have no ids."""
        has_ids = self.kept is not None and self.kept.has_event_ids
        return ",".join(map(str, self.told)) if has_ids else None

    def submit(self, request: GenerationRequest, keeper: Keeper | None = None) -> None:
        """Open the stream of the next request."""
        self._streams.append(GenerationStream(self._loop, self._tokenizer, request=request, keeper=keeper))

    def close(self) -> None:
        """Abort unfinished requests. May be called twice."""
        for task in self._tasks:
            task.cancel()
        if self.kept is not None:
            self.kept.close()
        for stream in self._streams:
            stream.close()

    def retire(self, reason: FinishReason) -> Future[None] | None:
        """End the streams of this connection, which another connection takes over.

        The future is done once all have ended.
        """
        self.retired = reason
        for stream in self._streams:
            stream.give_up(reason)
        with contextlib.suppress(EngineStoppedError):  # nothing runs then
            return [None, *(stream.ended() for stream in self._streams)][-1]
        return None

    async def groups(self) -> AsyncGenerator[list[NumberedDelta], None]:
        """Yield groups of all ready deltas, each with the number of its choice.

        Raises: ApiError 422 if the model fails on a choice; EngineStoppedError if the engine stops.
        """
        arrivals: asyncio.Queue[int | NumberedDelta] = asyncio.Queue()
        self._tasks = [
            asyncio.create_task(self._forward(prompt, stream, arrivals)) for prompt, stream in enumerate(self._streams)
        ]
        self._all_ended = asyncio.gather(*self._tasks, return_exceptions=True)
        num_open = len(self._streams)
        while num_open:
            arrived = _take_ready(await arrivals.get(), arrivals)
            group = [item for item in arrived if not isinstance(item, int)]
            self._refuse_failed(group)
            for choice, _ in group:
                self.elapsed_s[choice] = time.monotonic() - self._started_s
            if group:
                yield group
            for ended in (item for item in arrived if isinstance(item, int)):
                await self._tasks[ended]
                num_open -= 1

    async def results(self) -> list[ChoiceResult]:
        """Wait for every choice to end."""
        results = [ChoiceResult() for _ in self.request_of_choice]
        async for group in self.groups():
            for choice, delta in group:
                results[choice].add(delta)
        return results

    def _refuse_failed(self, group: list[NumberedDelta]) -> None:
        finishes = [delta.finish for _, delta in group if delta.finish is not None]
        failures = [finish for finish in finishes if finish.kind == "error" and finish.source is None]
        if failures and failures[0] is TAKEN_OVER:
            raise ApiError(409, str(TAKEN_OVER.message), code="taken_over")
        if failures and failures[0] is HANDED_OVER:
            raise ApiError(503, str(HANDED_OVER.message), code="handed_over")
        if failures:
            self._loop.check_health()
            raise ApiError(422, failures[0].message or "the model failed on this request", code="model_failed")

    async def _forward(
        self, prompt: int, stream: GenerationStream, arrivals: asyncio.Queue[int | NumberedDelta]
    ) -> None:
        """Forward the deltas of a prompt, then its number, which marks the end of the stream."""
        try:
            async for delta in stream:
                arrivals.put_nowait((self._first_choice[prompt] + delta.choice_index, delta))
        finally:
            arrivals.put_nowait(prompt)


async def open_streams(
    state: ApiState,
    requests: Sequence[GenerationRequest],
    *,
    param_names: Mapping[str, str] | None = None,
    scope: Scope | None = None,
) -> RequestStreams:
    """Submit every request, or none: if `GenerationStream` raises, the submitted ones are aborted.

    `param_names` maps the engine's field names to the route's. `scope` of an HTTP request gives its journal, its
    session and its hints about pages. Other tasks run between many choices.
    """
    with_adapter = partial(keyed, state.loop.control)
    with refusals_named(param_names or {}):
        state.loop.capacity.check_size(len(requests))
        requests = [
            request if request.thinking_token_budget is None else with_thinking_limit(request, state.chat_output)
            for request in map(with_adapter, requests)
        ]
    if scope is not None:
        name, retention = session_name(scope, first_headers=state.server.session_headers), retention_of(scope)
        requests = [
            replace(request, session=session_key(name, scope=scope, cache_salt=request.cache_salt), retention=retention)
            for request in requests
        ]
    asking = None if scope is None else asking_of(scope)
    kept = await kept_request(asking, requests, card=state.card, capacity=state.loop.capacity, keyed=with_adapter)
    requests = requests if kept is None else kept.requests
    streams, num_choices = RequestStreams(state, requests), 0
    streams.kept = kept
    if kept is not None:
        kept.on_loss(streams.retire)
    with contextlib.ExitStack() as undo, refusals_named(param_names or {}):
        undo.callback(streams.close)
        for place, request in enumerate(requests):
            if request.constraint is not None and state.loop.constraints is not None:
                compiled = state.loop.constraints.submit(request.constraint)
                await asyncio.shield(asyncio.wrap_future(compiled))  # others may wait for the same
            streams.submit(request, None if kept is None else kept.keepers[place])
            num_choices += request.sampling.n
            if num_choices >= CHOICES_AT_ONCE:
                num_choices = 0
                await asyncio.sleep(0)
        if streams.retired is not None:  # while they were opened
            streams.retire(streams.retired)
        undo.pop_all()
    return streams


@contextlib.contextmanager
def refusals_named(param_names: Mapping[str, str]) -> Generator[None, None, None]:
    """Convert a RequestError, except for an unknown adapter, to an ApiError 400 under the route's name of the field."""
    try:
        yield
    except UnknownAdapterError:
        raise
    except RequestError as error:
        param = param_names.get(error.param or "", error.param)
        sentence = _QUOTED.sub(lambda found: f"`{param_names.get(found[1], found[1])}`", str(error))
        message = f"`{param}`: {sentence}" if param and param not in sentence else sentence
        raise ApiError(400, message, param=param) from error


def _take_ready(first: _Item, queue: asyncio.Queue[_Item]) -> list[_Item]:
    taken = [first]
    while not queue.empty():
        taken.append(queue.get_nowait())
    return taken
