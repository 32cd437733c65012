"""Request batching: prompts with short samples share calls, since a call costs the same for one prompt or many."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.schema import Rollout

BATCH_WAIT_S = 0.02
"""Maximum wait of the first prompt of a batch for others."""
SHORT_TOKENS = 256
"""Prompts whose expected samples are longer are sent alone, because a call returns with its longest sample."""
MAX_PROMPT_TOKENS = 16384
"""Maximum prompt tokens of a call."""
_DECAY_PER_CALL = 0.1

Outcome = list[Rollout] | Refused | Faulty | Unavailable | Unusable
Answer = asyncio.Future[list[Rollout]]


class BatchSource(Protocol):
    """A source that samples several prompts with a single call."""

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Sample prompts; return the samples of each. Raises like `Source.generate`, for all of them."""
        ...

    async def model_info(self) -> dict[str, Any]:
        """Return the fields of `Source.model_info`."""
        ...


class RequestBatcher:
    """A `Source` that batches concurrent requests into calls of up to `max_samples` samples.

    Prompts of a call are answered together, so the requests that follow them also arrive together. If a call is
    rejected or fails, each of its prompts is requested alone, so that none fails because of another. A server accepts a
    call as a whole; if it is busy, later calls are smaller.
    """

    def __init__(self, source: BatchSource, *, max_samples: int) -> None:
        self._source, self._max_samples = source, max_samples
        self._capacity = max_samples
        """Current maximum samples of a call: halved if the server is busy, grown with every answer."""
        self._waiting: list[tuple[SampleRequest, Answer]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[list[Outcome]]] = set()
        self._max_tokens = math.inf
        """Tokens of the longest recent sample."""

    async def model_info(self) -> dict[str, Any]:
        """Return the source's model info."""
        return await self._source.model_info()

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        """Sample a prompt, alone or in a batch. Raises like the source."""
        expected = min(request.sampling.get("max_new_tokens", math.inf), 2 * self._max_tokens)
        if expected > SHORT_TOKENS:
            return (await self._ask([request]))[0]
        loop = asyncio.get_running_loop()
        if not self._fits(request):
            self._dispatch()
        answer = loop.create_future()
        self._waiting.append((request, answer))
        if self._num_samples >= self._capacity:
            self._dispatch()
        elif self._timer is None:
            self._timer = loop.call_later(BATCH_WAIT_S, self._dispatch)
        return await answer

    @property
    def _num_samples(self) -> int:
        return sum(request.count for request, _ in self._waiting)

    def _fits(self, request: SampleRequest) -> bool:
        num_tokens = sum(len(other.prompt_ids) for other, _ in self._waiting) + len(request.prompt_ids)
        return self._num_samples + request.count <= self._capacity and num_tokens <= MAX_PROMPT_TOKENS

    def _dispatch(self) -> None:
        """Send a call for all waiting prompts that were not cancelled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(request, answer) for request, answer in self._waiting if not answer.done()]
        self._waiting = []
        if not batch:
            return
        requests, answers = zip(*batch, strict=True)
        task = asyncio.get_running_loop().create_task(self._outcomes(requests))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(partial(_resolve, answers))
        for answer in answers:
            answer.add_done_callback(lambda _: all(each.cancelled() for each in answers) and task.cancel())

    async def _outcomes(self, requests: Sequence[SampleRequest]) -> list[Outcome]:
        try:
            return [*await self._ask(requests)]
        except (Refused, Faulty, Unavailable, Unusable) as error:
            if len(requests) == 1:
                return [error]
            if isinstance(error, Unavailable):
                self._capacity = max(1, sum(request.count for request in requests) // 2)
            if isinstance(error, Unavailable | Unusable):
                return [error] * len(requests)
        alone = await asyncio.gather(*(self._outcomes([request]) for request in requests))
        return [outcome for (outcome,) in alone]

    async def _ask(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        answers = await self._source.generate_many(requests)
        max_tokens = max((len(rollout.output_ids) for answer in answers for rollout in answer), default=0)
        self._capacity = min(self._max_samples, self._capacity + 1 + self._capacity // 8)
        before = self._max_tokens if math.isfinite(self._max_tokens) else 0.0
        self._max_tokens = max(max_tokens, (1 - _DECAY_PER_CALL) * before)
        return answers


def _resolve(answers: Sequence[Answer], task: asyncio.Task[list[Outcome]]) -> None:
    """Set the outcomes of a call on the futures that still wait for them."""
    failure = None if task.cancelled() else task.exception()
    for index, answer in enumerate(answers):
        if answer.done():
            continue
        if task.cancelled():
            answer.cancel()
            continue
        outcome = failure or task.result()[index]
        if isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
