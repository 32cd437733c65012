"""The engine thread around a model that only counts: commands, limits, failures, ends."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.config.settings import CacheSettings, ClusterSettings, SchedulerSettings, Settings
from rayserve_moe.engine.admission import EngineBusyError
from rayserve_moe.engine.loop import EngineLoop, EngineStoppedError
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, RequestError, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from tests.support.devices.counting_executor import CARD, CountingExecutor

TIMEOUT_S = 600


class Listener:
    """Collects the updates of one request until all its choices have ended."""

    def __init__(self, num_choices: int = 1) -> None:
        self._arrived: queue.SimpleQueue[list[ChoiceResult]] = queue.SimpleQueue()
        self._num_open = num_choices
        self.ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.finish: list[FinishReason | None] = [None] * num_choices
        self.num_updates = self.num_cached = 0
        self.receive = self._arrived.put

    def read(self) -> None:
        """Wait for the next updates."""
        for update in self._arrived.get(timeout=TIMEOUT_S):
            assert self.finish[update.choice_index] is None, "an update after the last one"
            self.num_updates += 1
            self.num_cached = update.num_cached_tokens
            self.ids[update.choice_index] += update.token_ids
            assert len(update.logprobs) == len(update.token_ids)
            self.finish[update.choice_index] = update.finish
            self._num_open -= update.finish is not None

    def read_all(self) -> list[FinishReason | None]:
        while self._num_open:
            self.read()
        return self.finish


def request(name: str = "r", prompt: object = (7,), *, seed: int | None = 1, **sampling: object) -> GenerationRequest:
    params = SamplingParams(**{"max_new_tokens": 5, "seed": seed, **sampling})
    return GenerationRequest(name, np.asarray(prompt, np.int32), params)


@contextmanager
def loop_over(
    executor: CountingExecutor, *, step_timeout_s: float = TIMEOUT_S, **scheduler: int
) -> Iterator[EngineLoop]:
    settings = Settings(
        scheduler=SchedulerSettings(**{"max_running_requests": 4, **scheduler}),
        cache=CacheSettings(page_size=4),
        cluster=ClusterSettings(idle_release_s=0.01, step_timeout_s=step_timeout_s),
    )
    loop = EngineLoop(executor, CARD, settings=settings)
    try:
        yield loop
    finally:
        executor.may_step.set()
        executor.may_stage.set()
        loop.shutdown()


def run(loop: EngineLoop, wanted: GenerationRequest) -> Listener:
    listener = Listener(wanted.sampling.n)
    loop.submit(wanted, listener.receive)
    return listener


def test_a_request_gets_its_tokens_and_one_end():
    with loop_over(CountingExecutor()) as loop:
        listener = run(loop, request())
        assert listener.read_all() == [FinishReason("length")]
        assert listener.ids == [[8, 9, 10, 11, 12]]
        loop.check_integrity()
        assert loop.statistics()["requests_live"] == 0
        assert loop.statistics()["pages_free"] == loop.statistics()["pages_total"]


@pytest.mark.parametrize(
    ("sampling", "ids", "finish"),
    [
        ({"stop_token_ids": (9, 11)}, [8, 9], FinishReason("stop", matched=9)),
        ({"stop_token_ids": (400,)}, [8, 9, 10, 11, 12], FinishReason("length")),
        ({"max_new_tokens": 1, "stop_token_ids": (8,)}, [8], FinishReason("stop", matched=8)),
        ({"max_new_tokens": 0}, [], FinishReason("length")),
    ],
)
def test_generation_ends_where_it_should(sampling, ids, finish):
    with loop_over(CountingExecutor()) as loop:
        listener = run(loop, request(**sampling))
        assert listener.read_all() == [finish]
        assert listener.ids == [ids]


def test_the_end_of_sequence_token_ends_unless_ignored():
    with loop_over(CountingExecutor()) as loop:
        stopped = run(loop, request("a", [498]))
        ignored = run(loop, request("b", [498], ignore_eos=True))
        both = run(loop, request("c", [498], ignore_eos=True, stop_token_ids=(501,)))
        assert stopped.read_all() == [FinishReason("stop", matched=500)] and stopped.ids == [[499, 500]]
        assert ignored.read_all() == [FinishReason("length")] and ignored.ids == [[499, 500, 501, 502, 503]]
        assert both.read_all() == [FinishReason("stop", matched=501)] and both.ids == [[499, 500, 501]]


def test_a_failing_executor_ends_all_requests_and_refuses_new_ones(caplog):
    executor = CountingExecutor()
    executor.may_step.clear()
    with loop_over(executor, max_running_requests=2) as loop, caplog.at_level(logging.CRITICAL + 1):
        listeners = [run(loop, request(f"r{i}", n=2)) for i in range(3)]
        loop.check_health()
        executor.fails_from = 0
        executor.may_step.set()
        for listener in listeners:
            for reason in listener.read_all():
                assert reason is not None and reason.kind == "error"
                assert "host 1 is gone" in (reason.message or "")
        with pytest.raises(EngineStoppedError, match="host 1 is gone"):
            loop.submit(request("late"), Listener().receive)
        with pytest.raises(EngineStoppedError, match="host 1 is gone"):
            loop.check_health()
        with pytest.raises(EngineStoppedError, match="host 1 is gone"):
            loop.check_integrity()
        loop.abort_stem("r0")
    assert executor.num_calls == 1, "nothing may be executed after a failure"
    assert executor.num_shutdowns == 1


def test_more_than_the_queue_holds_is_refused_until_there_is_room():
    executor = CountingExecutor()
    executor.may_step.clear()
    with loop_over(executor, max_running_requests=1, max_waiting_requests=2) as loop:
        listeners = [run(loop, request(f"r{i}")) for i in range(3)]
        with pytest.raises(EngineBusyError, match="3 requests"):
            loop.submit(request("more"), Listener().receive)
        executor.may_step.set()
        for listener in listeners:
            assert listener.read_all() == [FinishReason("length")]
        assert run(loop, request("more")).read_all() == [FinishReason("length")]


def test_a_request_that_was_taken_over_needs_no_free_place():
    executor = CountingExecutor()
    executor.may_step.clear()
    with loop_over(executor, max_running_requests=1, max_waiting_requests=0) as loop:
        first, resumed = run(loop, request("first")), Listener()
        loop.submit(request("resumed"), resumed.receive, committed=[ChoiceResult(token_ids=[1])])
        with pytest.raises(EngineBusyError, match="2 requests"):
            loop.submit(request("new"), Listener().receive)
        executor.may_step.set()
        assert first.read_all() == resumed.read_all() == [FinishReason("length")]


def test_an_id_is_in_use_until_its_request_ends():
    executor = CountingExecutor()
    executor.may_step.clear()
    with loop_over(executor) as loop:
        listener = run(loop, request("same"))
        with pytest.raises(RequestError, match="this id is running"):
            loop.submit(request("same"), Listener().receive)
        executor.may_step.set()
        listener.read_all()
        run(loop, request("same")).read_all()


def test_a_request_that_cannot_be_served_is_not_queued():
    with loop_over(CountingExecutor(num_pages=6)) as loop:
        with pytest.raises(RequestError, match="pool of 20 tokens"):
            loop.submit(request(max_new_tokens=20), Listener().receive)
        assert loop.statistics()["requests_live"] == 0


def test_abort_ends_every_choice_and_frees_its_pages():
    executor = CountingExecutor()
    executor.may_step.clear()
    with loop_over(executor, max_running_requests=2) as loop:
        listener = run(loop, request("gone", n=3, max_new_tokens=50))
        other = run(loop, request("stays"))
        assert executor.in_step.wait(TIMEOUT_S)
        loop.abort_stem("gone")
        loop.abort_stem("gone")
        loop.abort_stem("never was")
        executor.may_step.set()
        assert listener.read_all() == [FinishReason("abort")] * 3
        assert all(len(ids) < 50 for ids in listener.ids)
        assert other.read_all() == [FinishReason("length")]
        loop.check_integrity()
        assert loop.statistics()["pages_free"] == loop.statistics()["pages_total"]


def test_a_choice_whose_text_is_complete_ends_and_leaves_the_others():
    with loop_over(CountingExecutor()) as loop:
        listener = Listener(2)

        def receive(updates: list[ChoiceResult]) -> list[int]:
            listener.receive(updates)
            return [update.choice_index for update in updates if update.choice_index == 1]

        loop.submit(request(n=2, max_new_tokens=40), receive)
        assert listener.read_all() == [FinishReason("length"), FinishReason("stop")]
        assert listener.ids[0] == list(range(8, 48)) and listener.ids[1] == [8]
        loop.check_integrity()


def test_shutdown_aborts_what_runs_and_refuses_what_comes():
    executor = CountingExecutor()
    executor.may_step.clear()
    with loop_over(executor) as loop:
        listener = run(loop, request(max_new_tokens=50))
        assert executor.in_step.wait(TIMEOUT_S)
        stopping = threading.Thread(target=loop.shutdown)
        stopping.start()
        wait_until_unhealthy(loop)
        executor.may_step.set()
        stopping.join(TIMEOUT_S)
        assert not stopping.is_alive()
        assert listener.read_all() == [FinishReason("abort")]
        with pytest.raises(EngineStoppedError, match="shut down"):
            loop.submit(request(), Listener().receive)
        with pytest.raises(EngineStoppedError, match="shut down"):
            loop.check_health()
        loop.shutdown()


def wait_until_unhealthy(loop: EngineLoop) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    with suppress(EngineStoppedError):
        while True:
            loop.check_health()
            assert time.monotonic() < deadline, "the engine is still healthy"


def test_a_step_that_takes_too_long_is_unhealthy_and_recovers():
    executor = CountingExecutor()
    executor.may_step.clear()
    with loop_over(executor, step_timeout_s=0.05) as loop:
        loop.check_health()
        listener = run(loop, request())
        assert executor.in_step.wait(TIMEOUT_S)
        wait_until_unhealthy(loop)
        with pytest.raises(EngineStoppedError, match=r"over 0\.05 s"):
            loop.check_health()
        executor.may_step.set()
        assert listener.read_all() == [FinishReason("length")]
        loop.check_health()


def test_an_idle_executor_is_released_once_and_taken_again():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        assert executor.released.wait(TIMEOUT_S), "it is idle before the first request"
        executor.released.clear()
        run(loop, request("a")).read_all()
        assert executor.released.wait(TIMEOUT_S)
        executor.released.clear()
        assert not executor.released.wait(0.05), "it is idle still"
        loop.check_health()
        num_steps = executor.num_steps
        assert run(loop, request("b")).read_all() == [FinishReason("length")]
        assert executor.num_steps > num_steps


def test_a_client_that_cannot_be_told_keeps_nobody_else_from_its_end(caplog):
    """Its neighbours end in the same step: some of them before it hears of that, others after."""

    def broken(_: list[ChoiceResult]) -> None:
        raise ZeroDivisionError("no more text")

    executor = CountingExecutor()
    executor.may_step.clear()
    with loop_over(executor) as loop, caplog.at_level(logging.CRITICAL + 1):
        before = run(loop, request("before", max_new_tokens=1))
        loop.submit(request("broken", max_new_tokens=1), broken)
        after, later = (run(loop, request(f"{n}", max_new_tokens=n)) for n in (1, 9))
        executor.may_step.set()
        assert loop.has_failed.result(TIMEOUT_S)
        ends = [listener.read_all()[0] for listener in (before, after, later)]
    assert [end.kind for end in ends if end] == ["length", "error", "error"]


def test_what_was_kept_back_comes_with_a_failure(caplog):
    executor = CountingExecutor()
    executor.fails_from = 20
    with loop_over(executor) as loop, caplog.at_level(logging.CRITICAL + 1):
        listener = run(loop, request(max_new_tokens=80))
        (reason,) = listener.read_all()
        assert reason is not None and reason.kind == "error"
        assert listener.ids == [list(range(8, 26))], "19 steps went well, and the result of the last is lost"


@pytest.mark.parametrize("overlap_steps", [True, False])
def test_clients_hear_at_once_and_in_groups_or_once_at_the_end(overlap_steps):
    with loop_over(CountingExecutor(), overlap_steps=overlap_steps) as loop:
        increments, whole = request("increments", max_new_tokens=60), request("whole", max_new_tokens=60)
        listeners = [run(loop, increments), run(loop, replace(whole, incremental=False))]
        assert [listener.read_all() for listener in listeners] == [[FinishReason("length")]] * 2
        assert [listener.ids for listener in listeners] == [[list(range(8, 68))]] * 2
        assert listeners[0].num_updates > 1 and listeners[1].num_updates == 1


def test_cached_prefixes_are_found_until_they_are_flushed():
    with loop_over(CountingExecutor()) as loop:
        found = []
        for name in "abcd":
            listener = run(loop, request(name, range(20), max_new_tokens=1))
            listener.read_all()
            found.append(listener.num_cached)
            if name == "b":
                loop.flush()
                loop.check_integrity()
                assert loop.statistics()["pages_cached"] == 0
        assert found == [0, 16, 0, 16]


def held(loop: EngineLoop, executor: CountingExecutor, names: list[str]) -> dict[str, Listener]:
    """Requests that are running, or waiting, while the executor is held in a step."""
    executor.may_step.clear()
    return {name: run(loop, request(name, max_new_tokens=90)) for name in names}


def test_everything_is_aborted_and_nothing_that_comes_after():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        assert loop.is_idle
        listeners = held(loop, executor, [f"r{i}" for i in range(7)])
        assert not loop.is_idle
        loop.abort_all()
        after = run(loop, request("after"))
        executor.may_step.set()
        assert all(listener.read_all() == [FinishReason("abort")] for listener in listeners.values())
        assert after.read_all() == [FinishReason("length")]
        assert loop.is_idle
        loop.check_integrity()


def test_a_stem_stands_for_the_requests_of_its_batch():
    executor = CountingExecutor()
    with loop_over(executor, max_running_requests=8) as loop:
        listeners = held(loop, executor, ["a", "a_0", "a_12", "a-1", "ab", "a_0_1", "b_0", "A_0"])
        loop.abort_stem("a")
        executor.may_step.set()
        ended = {name: listener.read_all()[0] for name, listener in listeners.items()}
        aborted = {name for name, finish in ended.items() if finish == FinishReason("abort")}
        assert aborted == {"a", "a_0", "a_12", "a-1"}


def test_a_late_abort_does_not_meet_the_next_request_of_that_name():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        first = run(loop, request("a"))
        first.read_all()
        executor.may_step.clear()
        held_by = run(loop, request("b", max_new_tokens=2))
        assert executor.in_step.wait(TIMEOUT_S)
        loop.abort_stem("a")
        again = run(loop, request("a"))
        executor.may_step.set()
        assert again.read_all() == [FinishReason("length")] and held_by.read_all() == [FinishReason("length")]


def test_statistics_tell_who_runs_and_who_waits():
    executor = CountingExecutor()
    with loop_over(executor, max_running_requests=2) as loop:
        executor.may_step.clear()
        listeners = [run(loop, request(f"r{i}", [*range(10 * i, 10 * i + 9)], n=n)) for i, n in enumerate((3, 1))]
        assert executor.in_step.wait(TIMEOUT_S)
        numbers = loop.statistics()
        assert numbers["requests_live"] == 2
        assert numbers["requests_running"] + numbers["requests_waiting"] == 4
        executor.may_step.set()
        for listener in listeners:
            listener.read_all()
        idle = loop.statistics()
        assert idle["requests_running"] == idle["requests_waiting"] == idle["tokens_in_use"] == 0
