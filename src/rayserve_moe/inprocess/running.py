"""Running requests of this process, streamed or awaited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from tqdm import tqdm

from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.engine.admission import EngineBusyError
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.text.tokenizer import Tokenizer


class RunningRequest:
    """A submitted request and the results of its choices so far. Close its stream, unless `wait_async` did."""

    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer, *, request: GenerationRequest) -> None:
        self._started_s = time.perf_counter()
        self.request = request
        self.results = [ChoiceResult() for _ in range(request.sampling.n)]
        self.stream = GenerationStream(loop, tokenizer, request=request)
        self.elapsed_s = 0.0

    def wait(self) -> None:
        """Wait for the end of every choice."""
        for delta in self.stream:
            self.results[delta.choice_index].add(delta)
        self.record_time()

    async def wait_async(self) -> None:
        """Wait for the end of every choice in an event loop. The stream is closed, also on cancellation."""
        try:
            async for delta in self.stream:
                self.results[delta.choice_index].add(delta)
        finally:
            self.stream.close()
        self.record_time()

    def record_time(self) -> None:
        """Set `elapsed_s`, the seconds since the request was submitted."""
        self.elapsed_s = time.perf_counter() - self._started_s


def run_to_end(
    loop: EngineLoop, tokenizer: Tokenizer, *, requests: Sequence[GenerationRequest], shows_progress: bool
) -> list[RunningRequest]:
    """Run all requests to completion, queueing those beyond the engine's limits; show a progress bar on a terminal.

    Errors of `EngineLoop.submit` propagate; running requests are then aborted.
    """
    running: list[RunningRequest] = []
    with ExitStack() as cleanup:
        bar = cleanup.enter_context(
            tqdm(total=len(requests), disable=None if shows_progress and len(requests) > 1 else True, unit="request")
        )
        unfinished: deque[RunningRequest] = deque()
        for request in requests:
            while (one := _submitted(loop, tokenizer, request, others=unfinished)) is None:
                unfinished.popleft().wait()
                bar.update()
            cleanup.callback(one.stream.close)
            unfinished.append(one)
            running.append(one)
        for one in unfinished:
            one.wait()
            bar.update()
    return running


def _submitted(
    loop: EngineLoop, tokenizer: Tokenizer, request: GenerationRequest, *, others: deque[RunningRequest]
) -> RunningRequest | None:
    """Submit a request; return None while the engine is full and any of the `others` is unfinished."""
    try:
        return RunningRequest(loop, tokenizer, request=request)
    except EngineBusyError:
        if not others:
            raise
        return None
