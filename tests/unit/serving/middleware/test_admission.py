"""The queue of the threads is bounded, and work is dropped once its client has disconnected."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.requests import ClientDisconnect

from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware import admission as module
from rayserve_moe.serving.middleware.admission import SHORT_BYTES, Admission
from tests.support.serving.http_client import wait_until

LONG = SHORT_BYTES + 1
WITHIN_S = 30


@pytest.fixture
def admission():
    return Admission(1000)


async def stays():
    await asyncio.Event().wait()


async def leaves():
    return {"type": "http.disconnect"}


def test_bytes_beyond_the_bound_are_refused_until_others_are_done(admission):
    with admission.holding(600):
        with pytest.raises(ApiError) as refusal, admission.holding(600):
            pass
        assert refusal.value.status == 429 and "Retry-After" in refusal.value.response("/generate").headers
        with admission.holding(400):
            pass
    with admission.holding(5000):
        pass


def test_work_whose_client_has_left_never_runs(admission):
    """Both threads are taken: what waits behind is dropped with its client, and what runs is told to give up."""
    taken, told, ran = threading.Barrier(3), [], []

    def hold(is_cancelled):
        taken.wait(WITHIN_S)
        told.append(is_cancelled.wait(WITHIN_S))

    async def scenario():
        holding = [asyncio.create_task(admission.run(hold, size=LONG, receive=stays)) for _ in range(2)]
        await asyncio.to_thread(taken.wait, WITHIN_S)
        with pytest.raises(ClientDisconnect):
            await admission.run(ran.append, size=LONG, receive=leaves)
        short = await admission.run(lambda _: "short", size=1, receive=stays)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        assert await admission.run(lambda _: "free", size=LONG, receive=stays) == "free"
        return short

    assert asyncio.run(scenario()) == "short"
    wait_until(lambda: len(told) == 2)
    assert told == [True, True] and not ran


def test_a_full_queue_refuses_long_work_alone(admission, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    started, done = threading.Event(), threading.Event()

    async def scenario():
        first = asyncio.create_task(
            admission.run(lambda _: started.set() or done.wait(WITHIN_S), size=LONG, receive=stays)
        )
        await asyncio.to_thread(started.wait, WITHIN_S)
        with pytest.raises(ApiError) as refusal:
            await admission.run(lambda _: None, size=LONG, receive=stays)
        assert refusal.value.status == 429
        assert await admission.run(lambda _: 1, size=SHORT_BYTES, receive=stays) == 1
        done.set()
        assert await first

    asyncio.run(scenario())
