"""Streams of the answer to a request, as text, for a thread or an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

from rayserve_moe.answers.request_record import RECORD
from rayserve_moe.answers.resume import HeldBack, split
from rayserve_moe.engine.control import aborted
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.engine.output_dispatch import STOPPED
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.sequence import Sequence as Choice
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.choice_text import ChoiceText
from rayserve_moe.text.request_limits import bad_word_ids, with_thinking_limit
from rayserve_moe.text.tokenizer import Tokenizer


class Keeper(Protocol):
    """Recorder of committed results outside of this process, so that another engine can resume the request.

    `committed` is the committed result of each choice, without text; empty for a new request. `told` is the number of
    tokens of each choice that the reader has; its end counts as a token.
    """

    @property
    def committed(self) -> Sequence[ChoiceResult]: ...

    @property
    def told(self) -> Sequence[int]: ...

    def keep(self, updates: list[ChoiceResult], deliver: Callable[[], object]) -> None:
        """Record updates, then call `deliver` from any thread.

        The engine thread calls this method, so it must not block.
        """
        ...


class GenerationStream:
    """Submitted request with the updates of its choices in order; the last update of each choice has `finish`.

    Iterate it with `for` in a thread or with `async for` in an event loop, not both. `close` aborts unfinished choices.
    The engine thread matches stop strings as tokens arrive; the reader decodes all other text. With a `keeper`, updates
    arrive after they are recorded. Results that were committed elsewhere come first, those that the reader has as a
    separate update. Errors of `EngineLoop.submit` propagate.
    """

    def __init__(
        self, loop: EngineLoop, tokenizer: Tokenizer, *, request: GenerationRequest, keeper: Keeper | None = None
    ) -> None:
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
        self._loop, self._keeper = loop, keeper
        self._choices: list[Choice] = []
        if keeper is None:
            self._choices = loop.submit(request, self._receive)  # updates arrive from here on
        else:
            self._held_back = HeldBack(request)
            committed = self._go_on_from(keeper, prompt_len=num_prompt_tokens)
            is_streamed = request.wants_rows
            kept = replace(request, incremental=True, stream_routed_experts=is_streamed)
            if not committed or any(result.finish is None for result in committed):
                self._choices = loop.submit(kept, self._receive, committed=committed)
        if (record := RECORD.get()) is not None:
            record.choices.extend(self._choices)

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
        """Return all results that have arrived, without waiting."""
        results = []
        while self._arrived:
            result = self._arrived.popleft()
            results.append(result if self._finds_stops else self._texts[result.choice_index].feed(result))
            self._num_unfinished -= result.finish is not None
        return results

    def close(self) -> None:
        """Abort unfinished choices; does nothing if all have ended."""
        if self._num_unfinished:
            self._loop.abort(self._choices)

    def ended(self) -> Future[None]:
        """Abort unfinished choices; the future is done once the engine has released the request."""
        return aborted(self._loop.control, self._choices)

    def give_up(self, reason: FinishReason) -> None:
        """End unfinished choices for the reader with an error, from any thread."""
        self._arrived.extend(ChoiceResult(choice_index=index, finish=reason) for index in range(len(self._texts)))
        self._notify()

    def _go_on_from(self, keeper: Keeper, *, prompt_len: int) -> list[ChoiceResult]:
        """Queue results that were committed elsewhere, first the part that the reader has; return them.

        A choice that a stop string has completed is finished.
        """
        committed = [replace(result) for result in keeper.committed]
        for result, told in zip(committed, keeper.told, strict=False):
            at = min(told, len(result.token_ids))
            parts = split(result, at, prompt_len=prompt_len)
            if told > len(result.token_ids):
                parts = (replace(result), ChoiceResult(result.request_id, result.choice_index))
            updates = [part for part in parts if part.token_ids or part.finish is not None]
            for update in updates if self._finds_stops else ():
                self._texts[result.choice_index].feed(update)
            if result.finish is None and self._texts[result.choice_index].ending is not None:
                result.finish = STOPPED
                updates.append(ChoiceResult(result.request_id, result.choice_index, finish=STOPPED))
                self._texts[result.choice_index].feed(updates[-1])
            self._deliver(updates)
        return committed

    def _deliver(self, updates: list[ChoiceResult]) -> None:
        self._arrived.extend(self._held_back.pass_on(updates))
        self._notify()

    def _receive(self, updates: list[ChoiceResult]) -> list[int]:
        """Queue updates, in the engine thread; return the unfinished choices that a stop string has completed."""
        completed = []
        if self._finds_stops:
            for update in updates:
                self._texts[update.choice_index].feed(update)
            completed = [
                update.choice_index
                for update in updates
                if update.finish is None and self._texts[update.choice_index].ending is not None
            ]
        if self._keeper is not None:
            self._keeper.keep(updates, partial(self._deliver, updates))
            return completed
        self._arrived.extend(updates)
        self._notify()
        return completed


def _call_if_open(event_loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Schedule a callback from another thread, unless its event loop is closed."""
    try:
        event_loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return
