"""Prompts in company: those with short samples are asked for together, since a call costs the same for one or many."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable, Unusable
from rayserve_moe.rollouts.schema import Rollout

LINGER_S = 0.02
"""How long a prompt waits for others to come along."""
SHORT_TOKENS = 256
"""Prompts whose samples are expected to be longer go alone: an answer waits for the longest sample in it."""
MOST_PROMPT_TOKENS = 16384
"""Tokens of all prompts of one call."""
_FORGOTTEN_PER_CALL = 0.1

Outcome = list[Rollout] | Refused | Faulty | Unavailable | Unusable


class ManySource(Protocol):
    """Whoever samples several prompts at one call."""

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        """Sample prompts, and return the samples of each. Raises as `Source.generate`, for one and all."""
        ...

    async def model_info(self) -> dict[str, Any]:
        """As `Source.model_info`."""
        ...


class Companions:
    """A `Source` that asks for up to `most_samples` with one call, of prompts that are asked for about the same time.

    They are answered together, so that those who follow them come together, too. Where a call is refused or fails, each
    of its prompts is asked for alone: none suffers for another. Where it finds no place, the next ones ask for less:
    a server takes all of a call or nothing.
    """

    def __init__(self, source: ManySource, *, most_samples: int) -> None:
        self._source, self._most_samples = source, most_samples
        self._room = most_samples
        """Samples of one call, for now: less than may be, after a call that found no place."""
        self._waiting: list[tuple[SampleRequest, asyncio.Future[list[Rollout]]]] = []
        self._departure: asyncio.TimerHandle | None = None
        self._under_way: set[asyncio.Task[list[Outcome]]] = set()
        self._longest = math.inf
        """Tokens of the longest sample lately."""

    async def model_info(self) -> dict[str, Any]:
        """As the source tells it."""
        return await self._source.model_info()

    async def generate(self, request: SampleRequest) -> list[Rollout]:
        """Sample a prompt, alone or in company. Raises as the source does."""
        expected = min(request.sampling.get("max_new_tokens", math.inf), 2 * self._longest)
        if expected > SHORT_TOKENS:
            return (await self._ask([request]))[0]
        running = asyncio.get_running_loop()
        if not self._has_room_for(request):
            self._set_out()
        seat = running.create_future()
        self._waiting.append((request, seat))
        if self._num_samples >= self._room:
            self._set_out()
        elif self._departure is None:
            self._departure = running.call_later(LINGER_S, self._set_out)
        return await seat

    @property
    def _num_samples(self) -> int:
        return sum(request.count for request, _ in self._waiting)

    def _has_room_for(self, request: SampleRequest) -> bool:
        num_tokens = sum(len(other.prompt_ids) for other, _ in self._waiting) + len(request.prompt_ids)
        return self._num_samples + request.count <= self._room and num_tokens <= MOST_PROMPT_TOKENS

    def _set_out(self) -> None:
        """Ask for all who wait, but for those who have given up."""
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None
        company = [(request, seat) for request, seat in self._waiting if not seat.done()]
        self._waiting = []
        if not company:
            return
        requests, seats = zip(*company, strict=True)
        task = asyncio.get_running_loop().create_task(self._outcomes(requests))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        task.add_done_callback(partial(_hand_out, seats))
        for seat in seats:
            seat.add_done_callback(lambda _: all(each.cancelled() for each in seats) and task.cancel())

    async def _outcomes(self, requests: Sequence[SampleRequest]) -> list[Outcome]:
        try:
            return [*await self._ask(requests)]
        except (Refused, Faulty, Unavailable, Unusable) as error:
            if len(requests) == 1:
                return [error]
            if isinstance(error, Unavailable):
                self._room = max(1, sum(request.count for request in requests) // 2)
            if isinstance(error, Unavailable | Unusable):
                return [error] * len(requests)
        alone = await asyncio.gather(*(self._outcomes([request]) for request in requests))
        return [outcome for (outcome,) in alone]

    async def _ask(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        answers = await self._source.generate_many(requests)
        longest = max((len(rollout.output_ids) for answer in answers for rollout in answer), default=0)
        self._room = min(self._most_samples, self._room + 1 + self._room // 8)
        before = self._longest if math.isfinite(self._longest) else 0.0
        self._longest = max(longest, (1 - _FORGOTTEN_PER_CALL) * before)
        return answers


def _hand_out(seats: Sequence[asyncio.Future[list[Rollout]]], task: asyncio.Task[list[Outcome]]) -> None:
    """Give everybody who still waits what has come of the call."""
    failure = None if task.cancelled() else task.exception()
    for place, seat in enumerate(seats):
        if seat.done():
            continue
        if task.cancelled():
            seat.cancel()
            continue
        outcome = failure or task.result()[place]
        if isinstance(outcome, BaseException):
            seat.set_exception(outcome)
        else:
            seat.set_result(outcome)
