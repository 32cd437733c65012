"""Which requests share a call, and that each gets its own answer, whatever happens to the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rayserve_moe.rollouts import request_batching
from rayserve_moe.rollouts.answers import Faulty, Refused, SampleRequest, Unavailable
from rayserve_moe.rollouts.request_batching import RequestBatcher
from rayserve_moe.rollouts.schema import Rollout

MOST_SAMPLES = 8
Outcome = list[Rollout] | BaseException


class Recording:
    """Notes who was asked for together. `fault` says what is wrong with a prompt, `length_of` how long its samples get,
    `room_at` how many samples of which call there is place for."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.num_cancelled = 0
        self.fault: Callable[[str], BaseException | None] = lambda _: None
        self.length_of: Callable[[str], int] = lambda _: 1
        self.delay_s = 0.0
        self.room_at: Callable[[int], float] = lambda call: math.inf

    async def generate_many(self, requests: Sequence[SampleRequest]) -> list[list[Rollout]]:
        self.calls.append([request.prompt_id for request in requests])
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if sum(request.count for request in requests) > self.room_at(len(self.calls)):
            raise Unavailable("busy")
        for request in requests:
            if (fault := self.fault(request.prompt_id)) is not None:
                raise fault
        return [self.answer(request) for request in requests]

    def answer(self, request: SampleRequest) -> list[Rollout]:
        ids = np.zeros(self.length_of(request.prompt_id), np.int32)
        return [
            Rollout(request.prompt_id, i, "0", 0, ids, ids, ids.astype(np.float32), (), "", "stop")
            for i in range(request.count)
        ]

    async def model_info(self) -> dict[str, Any]:
        return {"served_model_name": "recorded"}


def requests(num_prompts: int, *, start: int = 0, **more: Any) -> list[SampleRequest]:
    sampling = {"max_new_tokens": more.pop("max_new_tokens", 16)}
    numbers = range(start, start + num_prompts)
    return [SampleRequest(str(i), [5, 6], sampling, 0, **{"count": 2, **more}) for i in numbers]


async def gathered(batcher: RequestBatcher, asked: Sequence[SampleRequest]) -> list[Outcome]:
    return await asyncio.gather(*map(batcher.generate, asked), return_exceptions=True)


def run(source: Recording, *waves: Sequence[SampleRequest]) -> list[list[Outcome]]:
    """Ask for each wave at once, one after the other."""

    async def drive() -> list[list[Outcome]]:
        batcher = RequestBatcher(source, max_samples=MOST_SAMPLES)
        return [await gathered(batcher, wave) for wave in waves]

    return asyncio.run(drive())


def assert_answered(outcomes: Sequence[Outcome], asked: Sequence[SampleRequest]) -> None:
    for outcome, request in zip(outcomes, asked, strict=True):
        assert isinstance(outcome, list) and {each.prompt_id for each in outcome} == {request.prompt_id}
        assert len(outcome) == request.count


def test_concurrent_requests_share_a_call() -> None:
    source, asked = Recording(), requests(6)
    (outcomes,) = run(source, asked)
    assert source.calls == [["0", "1", "2", "3"], ["4", "5"]]
    assert_answered(outcomes, asked)


def test_a_request_within_the_wait_joins_the_call() -> None:
    source = Recording()

    async def late(batcher: RequestBatcher, request: SampleRequest) -> list[Rollout]:
        await asyncio.sleep(request_batching.BATCH_WAIT_S / 4)
        return await batcher.generate(request)

    async def drive() -> None:
        batcher = RequestBatcher(source, max_samples=MOST_SAMPLES)
        first, second = requests(2)
        await asyncio.gather(batcher.generate(first), late(batcher, second))

    asyncio.run(drive())
    assert source.calls == [["0", "1"]]


@pytest.mark.parametrize(
    ("asked", "calls"),
    [
        (requests(3, count=8), [["0"], ["1"], ["2"]]),
        (requests(1, count=20), [["0"]]),
        ([*requests(1, count=7), *requests(2, start=1, count=1)], [["0", "1"], ["2"]]),
    ],
)
def test_a_call_has_at_most_so_many_samples(asked: list[SampleRequest], calls: list[list[str]]) -> None:
    """Of several prompts; one alone may want more."""
    source = Recording()
    (outcomes,) = run(source, asked)
    assert source.calls == calls
    assert_answered(outcomes, asked)


def test_a_full_call_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_batching, "BATCH_WAIT_S", 60.0)
    source = Recording()
    run(source, requests(4), requests(1, count=MOST_SAMPLES), requests(1, count=20))
    assert source.calls == [["0", "1", "2", "3"], ["0"], ["0"]]


def test_a_call_has_at_most_so_many_prompt_tokens() -> None:
    source = Recording()
    ids = [5] * (request_batching.MAX_PROMPT_TOKENS // 2)
    long = [SampleRequest(str(i), ids, {"max_new_tokens": 1}, 0) for i in range(3)]
    run(source, long)
    assert source.calls == [["0", "1"], ["2"]]


def test_prompts_with_long_samples_go_alone_until_they_prove_short() -> None:
    """What counts is how long samples may get, and how long they were lately."""
    source = Recording()
    source.length_of = lambda name: 1000 if name == "9" else 3
    long, longest = requests(2, max_new_tokens=2048), requests(1, start=9, max_new_tokens=2048)
    run(source, long, long, longest, long, requests(2))
    assert source.calls[:3] == [["0"], ["1"], ["0", "1"]], "they were short"
    assert source.calls[3:] == [["9"], ["0"], ["1"], ["0", "1"]], "one was not, and those that must be are short"


def test_short_samples_are_batched_again_after_long_ones() -> None:
    source = Recording()
    source.length_of = lambda name: 1000 if name == "9" else 3
    run(source, requests(1, start=9, max_new_tokens=2048), *[requests(2, max_new_tokens=2048)] * 20)
    assert source.calls[1] == ["0"] and source.calls[-1] == ["0", "1"]


@pytest.mark.parametrize("kind", [Refused, Faulty])
def test_a_refused_request_does_not_fail_the_others_of_its_call(kind: type[Refused] | type[Faulty]) -> None:
    source, asked = Recording(), requests(4)
    source.fault = lambda name: kind(f"not {name}") if name in "13" else None
    (outcomes,) = run(source, asked)
    assert sorted(map(len, source.calls)) == [1, 1, 1, 1, 4]
    assert [str(outcome) for outcome in outcomes[1::2]] == ["not 1", "not 3"]
    assert all(isinstance(outcome, kind) for outcome in outcomes[1::2])
    assert_answered(outcomes[::2], asked[::2])


@pytest.mark.parametrize("error", [Unavailable("busy", 3.0), RuntimeError("a bug")])
def test_a_failure_of_the_server_reaches_every_request_of_the_call(error: BaseException) -> None:
    """And nobody is asked for again here: whoever asks knows for how long to try."""
    source = Recording()
    source.fault = lambda _: error
    (outcomes,) = run(source, requests(3))
    assert outcomes == [error] * 3 and len(source.calls) == 1


def test_calls_to_a_busy_server_shrink_and_grow_again() -> None:
    """It takes all of a call or nothing: prompts that always came together would never be answered."""
    source, wave = Recording(), requests(4)
    source.room_at = lambda call: 4 if call < 10 else math.inf
    first, second, *_, last = run(source, *[wave] * 12)
    assert all(isinstance(outcome, Unavailable) for outcome in first) and len(source.calls[0]) == 4
    assert_answered(second, wave)
    assert_answered(last, wave)
    assert len(source.calls[-1]) == 4


def test_a_cancelled_request_cancels_no_other() -> None:
    source = Recording()
    source.delay_s = 0.1

    async def drive(give_up: Callable[[list[asyncio.Task]], Awaitable[None]]) -> list[Outcome]:
        batcher = RequestBatcher(source, max_samples=MOST_SAMPLES)
        tasks = [asyncio.create_task(batcher.generate(request)) for request in requests(3)]
        await give_up(tasks)
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def one_at_once(tasks: list[asyncio.Task]) -> None:
        await asyncio.sleep(0)
        tasks[0].cancel()

    async def one_under_way(tasks: list[asyncio.Task]) -> None:
        await asyncio.sleep(request_batching.BATCH_WAIT_S * 2)
        tasks[1].cancel()

    async def all_under_way(tasks: list[asyncio.Task]) -> None:
        await asyncio.sleep(request_batching.BATCH_WAIT_S * 2)
        for task in tasks:
            task.cancel()

    outcomes = asyncio.run(drive(one_at_once))
    assert isinstance(outcomes[0], asyncio.CancelledError) and source.calls == [["1", "2"]]
    assert_answered(outcomes[1:], requests(3)[1:])
    outcomes = asyncio.run(drive(one_under_way))
    assert isinstance(outcomes[1], asyncio.CancelledError) and source.num_cancelled == 0
    assert_answered(outcomes[::2], requests(3)[::2])
    outcomes = asyncio.run(drive(all_under_way))
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert source.num_cancelled == 1, "nobody waits for the call any more"


def test_model_info_is_that_of_the_source() -> None:
    told = asyncio.run(RequestBatcher(Recording(), max_samples=1).model_info())
    assert told == {"served_model_name": "recorded"}
