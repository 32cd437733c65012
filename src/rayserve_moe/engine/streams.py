"""Reading the answer to one request, as text, from a thread or from an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

from rayserve_moe.engine.engine_loop import EngineLoop
from rayserve_moe.requests import ChoiceResult, GenerationRequest
from rayserve_moe.text.bad_words import bad_word_ids
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.choice_text import ChoiceText
from rayserve_moe.text.thinking_limits import with_thinking_limit
from rayserve_moe.text.tokenizer import Tokenizer


class GenerationStream:
    """Submits a request and yields the updates of its choices in order; the last one of each choice has `finish`.

    Iterate it with `for` in a thread or with `async for` in an event loop, not both. `close` aborts what is
    unfinished. Stop strings are matched in the engine thread as tokens arrive; text that cannot end a choice is
    decoded by the reader. Raises what `EngineLoop.submit` raises.
    """

    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer, *, request: GenerationRequest) -> None:
        if request.sampling.bad_words:
            request = replace(request, bad_word_ids=bad_word_ids(tokenizer, request.sampling.bad_words))
        if request.thinking_token_budget is not None and request.thinking is None:
            request = with_thinking_limit(request, ChatOutput(tokenizer))
        num_prompt_tokens = len(request.prompt_ids)
        self._texts = [
            ChoiceText(
                tokenizer, request.sampling, num_prompt_tokens=num_prompt_tokens, kept_ids=request.kept_special_ids
            )
            for _ in range(request.sampling.n)
        ]
        self._num_unfinished = request.sampling.n
        self._finds_stops = request.sampling.is_watched
        self._arrived: deque[ChoiceResult] = deque()
        self._ready = threading.Event()
        self._notify: Callable[[], None] = self._ready.set
        self._loop, self._choices = loop, loop.submit(request, self._receive)  # from here on updates arrive

    def __iter__(self) -> Iterator[ChoiceResult]:
        while self._num_unfinished:
            self._ready.wait()
            self._ready.clear()
            yield from self.drain_ready()

    async def __aiter__(self) -> AsyncIterator[ChoiceResult]:
        ready, event_loop = asyncio.Event(), asyncio.get_running_loop()
        self._notify = lambda: _call_if_open(event_loop, ready.set)
        if self._arrived:
            ready.set()
        while self._num_unfinished:
            await ready.wait()
            ready.clear()
            for result in self.drain_ready():
                yield result

    def drain_ready(self) -> list[ChoiceResult]:
        """Everything that has arrived and was not read yet, without waiting."""
        results = []
        while self._arrived:
            result = self._arrived.popleft()
            results.append(result if self._finds_stops else self._texts[result.choice_index].feed(result))
            self._num_unfinished -= result.finish is not None
        return results

    def close(self) -> None:
        """Abort what is unfinished; nothing happens where all is done."""
        if self._num_unfinished:
            self._loop.abort(self._choices)

    def _receive(self, updates: list[ChoiceResult]) -> list[int]:
        """Queue updates, in the engine thread; returns the unfinished choices that a stop string has completed."""
        completed = []
        if self._finds_stops:
            for update in updates:
                self._texts[update.choice_index].feed(update)
            completed = [
                update.choice_index
                for update in updates
                if update.finish is None and self._texts[update.choice_index].ending is not None
            ]
        self._arrived.extend(updates)
        self._notify()
        return completed


def _call_if_open(event_loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Schedule a callback from another thread, unless its event loop is closed."""
    try:
        event_loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return
