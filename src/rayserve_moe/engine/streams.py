"""Reading the answer to one request, as text, from a thread or from an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from rayserve_moe.engine.engine_loop import EngineLoop
from rayserve_moe.requests import GenerationRequest, GenerationUpdate
from rayserve_moe.text.choice_text import ChoiceDelta, ChoiceText
from rayserve_moe.text.tokenizer import Tokenizer


class GenerationStream:
    """The deltas of one request, in the order they came about; every choice ends with one that has `finish`.

    Iterate it with `for` in a thread or with `async for` in an event loop, not both. `close` aborts what is
    unfinished. Stop strings are found where tokens arrive, in the engine thread, however late anybody reads; text that
    cannot end a choice is left to the reader.
    """

    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer, *, request: GenerationRequest) -> None:
        num_prompt_tokens = len(request.prompt_ids)
        self._texts = [
            ChoiceText(tokenizer, request.sampling, num_prompt_tokens=num_prompt_tokens)
            for _ in range(request.sampling.n)
        ]
        self._num_unfinished = request.sampling.n
        self._finds_stops = bool(request.sampling.stop)
        self._arrived: deque[GenerationUpdate | ChoiceDelta] = deque()
        self._ready = threading.Event()
        self._notify: Callable[[], None] = self._ready.set
        self._loop, self._choices = loop, loop.submit(request, self._receive)  # from here on updates arrive

    def __iter__(self) -> Iterator[ChoiceDelta]:
        while self._num_unfinished:
            self._ready.wait()
            self._ready.clear()
            yield from self.drain_ready()

    async def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        ready, event_loop = asyncio.Event(), asyncio.get_running_loop()
        self._notify = lambda: _call_if_open(event_loop, ready.set)
        if self._arrived:
            ready.set()
        while self._num_unfinished:
            await ready.wait()
            ready.clear()
            for delta in self.drain_ready():
                yield delta

    def drain_ready(self) -> list[ChoiceDelta]:
        """Everything that has arrived and was not read yet, without waiting."""
        deltas = []
        while self._arrived:
            arrived = self._arrived.popleft()
            delta = arrived if isinstance(arrived, ChoiceDelta) else self._read(arrived)
            self._num_unfinished -= delta.finish is not None
            deltas.append(delta)
        return deltas

    def close(self) -> None:
        """Abort what is unfinished; nothing happens where all is done."""
        if self._num_unfinished:
            self._loop.abort(self._choices)

    def _receive(self, updates: list[GenerationUpdate]) -> list[int]:
        """Take updates over in the engine thread; returns the choices that a stop string has completed."""
        if not self._finds_stops:
            self._arrived.extend(updates)
            self._notify()
            return []
        deltas = [self._read(update) for update in updates]
        self._arrived.extend(deltas)
        self._notify()
        return [delta.choice_index for delta in deltas if delta.stop_found]

    def _read(self, update: GenerationUpdate) -> ChoiceDelta:
        return self._texts[update.choice_index].feed(update)


def open_stream(loop: EngineLoop, tokenizer: Tokenizer, *, request: GenerationRequest) -> GenerationStream:
    """Submit a request and return its stream. Raises what `EngineLoop.submit` raises."""
    return GenerationStream(loop, tokenizer, request=request)


def _call_if_open(event_loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Schedule a callback from another thread, unless its loop is gone together with whoever listened."""
    try:
        event_loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return
