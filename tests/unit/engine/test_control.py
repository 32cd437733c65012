"""Pauses and updates around a model that only counts: when they take effect, and what they leave alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.engine.control import PAUSE_MODES, WeightOrder
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.requests.records import RequestError
from tests.support.devices.counting_executor import LOST_PATH, REFUSED_PATH, CountingExecutor
from tests.support.serving.http_client import wait_until
from tests.support.session.hypothesis_examples import examples
from tests.unit.engine.test_engine_loop import TIMEOUT_S, Listener, loop_over, request, run, wait_until_unhealthy

LONG = {"max_new_tokens": 90, "ignore_eos": True}


def held(executor: CountingExecutor, loop: EngineLoop, names: str = "ab") -> list[Listener]:
    """Requests that run, all in the step that is held."""
    loop.control.pause("in_place").result(TIMEOUT_S)
    executor.may_step.clear()
    listeners = [run(loop, request(name, prompt=(10 * (1 + ord(name)) % 400,), **LONG)) for name in names]
    loop.control.resume()
    assert executor.in_step.wait(TIMEOUT_S)
    return listeners


def let_go(executor: CountingExecutor) -> None:
    executor.may_step.set()


@pytest.mark.parametrize("mode", PAUSE_MODES)
def test_a_pause_takes_effect_after_the_step_that_is_under_way(mode: str):
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        listeners = held(executor, loop)
        paused = loop.control.pause(mode)
        assert not paused.done()
        let_go(executor)
        paused.result(TIMEOUT_S)
        numbers, num_steps = loop.statistics(), executor.num_steps
        assert loop.control.is_paused and numbers["paused"] == 1
        counts = {"abort": (0, 0), "retract": (0, 2), "in_place": (2, 0)}[mode]
        assert (numbers["requests_running"], numbers["requests_waiting"]) == counts
        assert (numbers["pages_free"] == numbers["pages_total"]) == (mode != "in_place")
        late = run(loop, request("late", **LONG))
        loop.check_integrity()
        loop.check_health()
        assert executor.num_steps == num_steps and loop.statistics()["requests_live"] == (1 if mode == "abort" else 3)
        loop.control.resume().result(TIMEOUT_S)
        kinds = [end.kind for listener in (*listeners, late) for end in listener.read_all() if end is not None]
        assert kinds == (["abort"] * 2 if mode == "abort" else ["length"] * 2) + ["length"]
        for listener in (*listeners, late):
            assert np.diff(listener.ids[0]).tolist() == [1] * (len(listener.ids[0]) - 1)


def test_a_pause_that_is_in_force_changes_nothing_once_more():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        for _ in range(2):
            loop.control.pause("abort").result(TIMEOUT_S)
        waiting = run(loop, request("waits"))
        loop.control.pause("abort").result(TIMEOUT_S)
        assert loop.statistics()["requests_waiting"] == 1
        for mode in ("in_place", "retract"):
            loop.control.pause(mode).result(TIMEOUT_S)
        assert loop.statistics()["requests_waiting"] == 1
        loop.control.pause("abort").result(TIMEOUT_S)
        assert waiting.read_all()[0].kind == "abort"
        for _ in range(2):
            loop.control.resume().result(TIMEOUT_S)
        assert run(loop, request("goes on")).read_all()[0].kind == "length"


def test_what_a_pause_keeps_waiting_can_be_aborted():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        first, second = held(executor, loop)
        paused = loop.control.pause("in_place")
        let_go(executor)
        paused.result(TIMEOUT_S)
        loop.abort_stem("a")
        assert first.read_all()[0].kind == "abort"
        loop.abort_all()
        assert second.read_all()[0].kind == "abort"
        assert loop.is_idle and loop.control.is_paused


def test_an_unknown_mode_is_refused():
    with loop_over(CountingExecutor()) as loop, pytest.raises(RequestError, match="in_place"):
        loop.control.pause("gently")


def test_steps_run_on_while_weights_are_read_and_other_weights_follow_between_two_steps():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        executor.may_stage.clear()
        update = loop.control.update_weights(WeightOrder("/second", "2"))
        assert executor.in_stage.wait(TIMEOUT_S)
        assert run(loop, request()).read_all()[0].kind == "length"
        assert executor.serving == "first" and loop.card.weight_version == "0"
        executor.may_stage.set()
        outcome = update.result(TIMEOUT_S)
        assert (outcome.success, outcome.weight_version, outcome.num_paused) == (True, "2", 0)
        assert executor.serving == "/second"
        assert (loop.card.weight_version, loop.card.path) == ("2", "/second")


def test_weights_that_are_refused_leave_all_as_it_is():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        outcome = loop.control.update_weights(WeightOrder(REFUSED_PATH, "2", aborts_requests=True)).result(TIMEOUT_S)
        assert not outcome.success and outcome.message == "a tensor is missing" and outcome.weight_version == "0"
        assert executor.serving == "first" and loop.card.weight_version == "0"
        with pytest.raises(RequestError, match="absolute"):
            loop.control.update_weights(WeightOrder("somewhere"))
        assert run(loop, request()).read_all()[0].kind == "length"


def test_a_host_that_is_lost_while_it_reads_is_a_failure_of_the_engine():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        executor.may_stage.clear()
        update = loop.control.update_weights(WeightOrder(LOST_PATH))
        assert executor.in_stage.wait(TIMEOUT_S)
        listener = held(executor, loop, "a")[0]
        executor.may_stage.set()
        wait_until(lambda: loop._commands._commands)  # the loss is known while the request still runs
        let_go(executor)
        with pytest.raises(EngineStoppedError, match="is gone"):
            update.result(TIMEOUT_S)
        finish = listener.read_all()[0]
        assert finish is not None and finish.kind == "error" and executor.serving == "first"
        with pytest.raises(EngineStoppedError):
            loop.check_health()
        for command in (loop.control.resume, lambda: loop.control.update_weights(WeightOrder("/second"))):
            with pytest.raises(EngineStoppedError):
                command()


def test_updates_come_one_after_the_other_and_are_numbered():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        orders = [WeightOrder(f"/{i}", version) for i, version in enumerate([None, None, "17", None, "ten", None])]
        outcomes = [update.result(TIMEOUT_S) for update in [loop.control.update_weights(order) for order in orders]]
        assert [outcome.weight_version for outcome in outcomes] == ["1", "2", "17", "18", "ten", "6"]
        assert executor.serving == "/5"


@pytest.mark.parametrize("aborts", [True, False])
def test_an_update_ends_requests_or_lets_them_go_on(aborts: bool):
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        listeners = held(executor, loop)
        paused = loop.control.pause("in_place")
        let_go(executor)
        paused.result(TIMEOUT_S)
        update = loop.control.update_weights(WeightOrder("/second", aborts_requests=aborts))
        assert update.result(TIMEOUT_S).success
        loop.control.resume().result(TIMEOUT_S)
        kinds = [end.kind for listener in listeners for end in listener.read_all() if end is not None]
        assert kinds == ["abort" if aborts else "length"] * 2


def test_an_update_of_a_paused_engine_tells_how_many_wait():
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        listeners = held(executor, loop, "abc")
        paused = loop.control.pause("retract")
        let_go(executor)
        paused.result(TIMEOUT_S)
        outcome = loop.control.update_weights(WeightOrder("/second")).result(TIMEOUT_S)
        assert outcome.num_paused == 3 and loop.control.is_paused
        loop.control.resume().result(TIMEOUT_S)
        assert [end.kind for listener in listeners for end in listener.read_all() if end] == ["length"] * 3


def test_who_waits_for_an_engine_that_stops_is_told():
    """Of a pause, its end, and an update whose weights are being read; who no longer waits does not matter."""
    executor = CountingExecutor()
    with loop_over(executor) as loop:
        executor.may_stage.clear()
        update = loop.control.update_weights(WeightOrder("/second"))
        assert executor.in_stage.wait(TIMEOUT_S)
        held(executor, loop, "a")
        given_up, paused, resumed = loop.control.resume(), loop.control.pause("in_place"), loop.control.resume()
        assert given_up.cancel()
        stopping = threading.Thread(target=loop.shutdown)
        stopping.start()
        wait_until_unhealthy(loop)
        let_go(executor)
        stopping.join(TIMEOUT_S)
        assert not stopping.is_alive()
        executor.may_stage.set()
        for told in (paused, resumed, update):
            assert isinstance(told.exception(TIMEOUT_S), EngineStoppedError)
        assert given_up.cancelled() and executor.serving == "first"


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("pause"), st.sampled_from(PAUSE_MODES)),
        st.tuples(st.just("resume")),
        st.tuples(st.just("submit"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("abort_all")),
        st.tuples(st.just("flush")),
        st.tuples(st.just("update"), st.sampled_from(["/second", "/third", REFUSED_PATH]), st.booleans()),
    ),
    max_size=25,
)


class Trainer:
    """Does to an engine whatever comes, from a thread of its own, and waits for nothing but pauses now and then."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self.listeners: list[Listener] = []
        self.futures: list[Any] = []

    def submit(self, n: int) -> None:
        name = f"r{len(self.listeners)}"
        self.listeners.append(run(self._loop, request(name, prompt=(7 * len(self.listeners) + 1,), n=n, **LONG)))

    def pause(self, mode: str) -> None:
        self.futures.append(self._loop.control.pause(mode))
        if mode == "in_place":
            self.futures[-1].result(TIMEOUT_S)

    def resume(self) -> None:
        self.futures.append(self._loop.control.resume())

    def abort(self, index: int) -> None:
        self._loop.abort_stem(f"r{index}")

    def abort_all(self) -> None:
        self._loop.abort_all()

    def flush(self) -> None:
        self._loop.flush()

    def update(self, path: str, aborts: bool) -> None:
        self.futures.append(self._loop.control.update_weights(WeightOrder(path, aborts_requests=aborts)))


@examples(60)
@given(events=EVENTS, num_pages=st.sampled_from([64, 40]))
def test_whatever_a_trainer_does_every_request_ends_as_it_should(events: list[tuple], num_pages: int):
    executor = CountingExecutor(num_pages)
    with loop_over(executor) as loop:
        trainer = Trainer(loop)
        for name, *arguments in events:
            getattr(trainer, name)(*arguments)
        trainer.resume()
        for future in trainer.futures:
            future.result(TIMEOUT_S)
        for listener in trainer.listeners:
            assert {end.kind for end in listener.read_all() if end is not None} <= {"length", "abort"}
            for ids in listener.ids:
                assert np.diff(ids).tolist() == [1] * (len(ids) - 1), "tokens are lost, or come twice"
        loop.check_integrity()
        numbers = loop.statistics()
        assert numbers["pages_free"] == numbers["pages_total"] and loop.is_idle
