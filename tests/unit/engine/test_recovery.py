"""Hosts are replaced under running requests: nothing is lost, nothing is committed twice, bounds hold."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.config.settings import CacheSettings, ClusterSettings, ParallelSettings, SchedulerSettings, Settings
from rayserve_moe.engine.admission import EngineRebuildingError
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.engine.executor import GroupLayout
from rayserve_moe.engine.loop import EngineLoop, EngineStoppedError
from rayserve_moe.engine.recovery import hosts as recovery
from rayserve_moe.engine.recovery.hosts import RebuildBounds, progress_of
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from tests.support.devices.counting_executor import CARD, LOST_PATH, ROUTING
from tests.support.devices.lost_hosts import LosingExecutor
from tests.support.session.hypothesis_examples import examples
from tests.unit.engine.test_engine_loop import TIMEOUT_S, Listener, request, run

CARD_WITH_ROWS = replace(CARD, returns_routing=True, routing=ROUTING)
POISON = 400


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(recovery, "WAITS_S", (0.0, 0.0))
    with caplog.at_level(logging.CRITICAL + 1):
        yield


@contextmanager
def recovering(
    executor: LosingExecutor, *, most: int = 1000, overlaps: bool = True, num_ranks: int = 1, **scheduler: int
) -> Iterator[EngineLoop]:
    wanted = Settings(
        parallel=ParallelSettings(data_parallel_size=num_ranks),
        scheduler=SchedulerSettings(**{"max_running_requests": 4, **scheduler}, overlap_steps=overlaps),
        cache=CacheSettings(page_size=4),
        cluster=ClusterSettings(
            idle_release_s=0.01, max_rebuilds_in_10_minutes=most, max_rebuilds_in_hour=1000, step_timeout_s=TIMEOUT_S
        ),
    )
    loop = EngineLoop(executor, CARD_WITH_ROWS, settings=wanted, rebuilder=executor)
    try:
        yield loop
    finally:
        for event in (executor.may_step, executor.may_stage, executor.may_rebuild):
            event.set()
        loop.shutdown()


def answers(loop: EngineLoop, wanted: list[GenerationRequest]) -> list[list[ChoiceResult]]:
    """All results, once every page is free again."""
    arrived = [[ChoiceResult() for _ in range(each.sampling.n)] for each in wanted]
    listeners = []
    for each, results in zip(wanted, arrived, strict=True):
        listener = Listener(each.sampling.n)

        def receive(updates, listener=listener, results=results):
            for update in updates:
                results[update.choice_index].add(update)
            listener.receive(updates)

        loop.submit(each, receive)
        listeners.append(listener)
    for listener in listeners:
        listener.read_all()
    loop.check_integrity()
    assert loop.statistics()["pages_free"] == loop.statistics()["pages_total"]
    return arrived


def varied() -> list[GenerationRequest]:
    """Requests of several kinds: long and short, of one and two choices, streamed rows and whole ones."""
    shared = {"return_routed_experts": True}
    return [
        replace(request("a", tuple(range(30)), max_new_tokens=12), **shared),
        replace(request("b", (40,), n=2, max_new_tokens=9), **shared),
        replace(request("c", (60, 61), max_new_tokens=30), stream_routed_experts=True, **shared),
        request("d", tuple(range(100, 140)), max_new_tokens=4),
        replace(request("e", (70,), max_new_tokens=20), incremental=False, **shared),
    ]


def said(results: list[list[ChoiceResult]]) -> list[tuple]:
    """What must not differ: tokens, log-probs, ends, and rows, none of which is missing."""
    for choices in results:
        for result in choices:
            assert result.routing is None or result.routing.missing == ()
    return [
        (r.token_ids, r.logprobs, r.finish, None if r.routing is None else r.routing.rows.tolist())
        for choices in results
        for r in choices
    ]


@given(losses=st.frozensets(st.integers(1, 60), max_size=6), late=st.booleans(), overlaps=st.booleans())
@examples(40, deadline=None)
def test_answers_are_those_without_a_loss(losses: frozenset[int], late: bool, overlaps: bool) -> None:
    with recovering(LosingExecutor()) as loop:
        expected = said(answers(loop, varied()))
    executor = LosingExecutor(losses, loses_late=late)
    with recovering(executor, overlaps=overlaps, max_step_tokens=32) as loop:
        assert said(answers(loop, varied())) == expected
        assert loop.statistics()["rebuilds"] == executor.num_rebuilds <= len(losses)


@given(
    losses=st.frozensets(st.integers(1, 60), min_size=1, max_size=6),
    ranks=st.lists(st.integers(1, 4), max_size=6),
    late=st.booleans(),
    overlaps=st.booleans(),
)
@examples(40, deadline=None)
def test_answers_are_those_without_a_loss_whatever_hosts_are_left(
    losses: frozenset[int], ranks: list[int], late: bool, overlaps: bool
) -> None:
    """Each loss leaves other data ranks of four, or brings some back; no step has rows of those that are gone."""
    with recovering(LosingExecutor()) as loop:
        expected = said(answers(loop, varied()))
    layouts = [GroupLayout(num, num_missing_hosts=4 - num) for num in (4, *ranks)]
    executor = LosingExecutor(losses, loses_late=late, layouts=layouts, rows_per_rank=2)
    with recovering(executor, overlaps=overlaps, num_ranks=4, max_running_requests=2, max_step_tokens=32) as loop:
        assert said(answers(loop, varied())) == expected
        statistics = loop.statistics()
        assert statistics["hosts_missing"] == executor.layout.num_missing_hosts
        assert statistics["pages_total"] == executor.layout.num_data_ranks * 63


def test_hosts_that_come_back_are_not_held_against_the_bounds() -> None:
    executor = LosingExecutor(layouts=[GroupLayout(1), GroupLayout(2)])
    with recovering(executor, most=1, num_ranks=2) as loop:
        for name in "abc":
            executor.lose_idle(is_loss=False)
            assert run(loop, request(name)).read_all()[0].kind == "length"
        executor.lose_idle()
        assert run(loop, request("d")).read_all()[0].kind == "length"
        assert executor.num_rebuilds == 4


def test_hosts_that_are_lost_while_nothing_runs_are_replaced_once() -> None:
    executor = LosingExecutor()
    with recovering(executor) as loop:
        run(loop, request("a")).read_all()
        executor.lose_idle()
        executor.on_loss()
        loop.check_integrity()
        assert executor.num_rebuilds == 1, "other hosts serve by then"
        assert run(loop, request("b")).read_all()[0].kind == "length"


def test_a_pause_outlives_a_loss_and_resumes_where_it_was() -> None:
    executor = LosingExecutor()
    with recovering(executor) as loop:
        executor.may_step.clear()
        listener = run(loop, request("a", max_new_tokens=40))
        assert executor.in_step.wait(TIMEOUT_S)
        paused = loop.control.pause("in_place")
        executor.losses = frozenset([executor.num_calls + 1, executor.num_calls + 2])
        executor.may_step.set()
        paused.result(TIMEOUT_S)
        assert loop.control.is_paused and executor.num_rebuilds > 0
        num_calls = executor.num_calls
        loop.check_integrity()
        assert executor.num_calls == num_calls, "nothing runs in a pause"
        loop.control.resume().result(TIMEOUT_S)
        assert listener.read_all()[0].kind == "length" and listener.ids == [list(range(8, 48))]


def test_requests_queue_for_new_hosts_and_are_refused_once_that_takes_long(monkeypatch) -> None:
    executor = LosingExecutor(frozenset([3]))
    executor.may_rebuild.clear()
    with recovering(executor) as loop:
        first = run(loop, request("a"))
        assert executor.in_rebuild.wait(TIMEOUT_S)
        second = run(loop, request("b"))
        loop.check_health()
        progress = progress_of(loop.recovery)
        assert progress is not None and progress.phase == "starting"
        monkeypatch.setattr("rayserve_moe.engine.admission.MAX_QUEUE_S", 0.0)
        with pytest.raises(EngineRebuildingError, match="starting"):
            loop.submit(request("c"), Listener().receive)
        with pytest.raises(EngineRebuildingError, match="starting"):
            replace(loop.capacity, max_live=2).check()  # it is full too: it rebuilds nevertheless
        loop.capacity.check(0)  # a request that needs no place is answered
        executor.may_rebuild.set()
        assert [each.read_all()[0].kind for each in (first, second)] == ["length"] * 2
        assert progress_of(loop.recovery) is None
        assert run(loop, request("c")).read_all()[0].kind == "length"


@pytest.mark.parametrize("num_failing", [0, 1, 2, 3])
def test_failed_rebuilds_count_and_the_engine_gives_up_at_the_bound(num_failing: int) -> None:
    executor = LosingExecutor(frozenset([3]))
    executor.num_failing = num_failing
    with recovering(executor, most=3) as loop:
        (finish,) = run(loop, request()).read_all()
        assert finish is not None and finish.kind == ("length" if num_failing < 3 else "error")
        assert executor.num_rebuilds == min(num_failing + 1, 3)
        if num_failing == 3:
            with pytest.raises(EngineStoppedError, match="no host joined"):
                loop.check_health()


@pytest.mark.parametrize(("finals", "num_tried"), [({1}, 5), ({1, 3}, 5), ({1, 2}, 2), ({2, 3}, 3)])
def test_the_engine_gives_up_where_the_weights_are_nowhere_twice_in_a_row(finals: set[int], num_tried: int) -> None:
    """Once may be a moment in which others begin to keep them."""
    executor = LosingExecutor(frozenset([4]))
    executor.num_failing, executor.finals = 4, frozenset(finals)
    with recovering(executor) as loop:
        (finish,) = run(loop, request()).read_all()
        assert finish is not None and finish.kind == ("length" if num_tried == 5 else "error")
        assert executor.num_rebuilds == num_tried


def test_rebuilds_are_counted_over_ten_minutes_and_over_an_hour() -> None:
    bounds, begun = RebuildBounds(2, 3), deque([0.0, 1.0])
    assert not bounds.allow(begun, now=599.0)
    assert bounds.allow(begun, now=602.0)
    begun.append(602.0)
    assert not bounds.allow(begun, now=1300.0)
    assert bounds.allow(begun, now=3600.5)


def test_a_shutdown_ends_a_rebuild() -> None:
    executor = LosingExecutor(frozenset([3]))
    executor.may_rebuild.clear()
    with recovering(executor) as loop:
        listener = run(loop, request())
        assert executor.in_rebuild.wait(TIMEOUT_S)
        loop.shutdown()
        assert listener.read_all()[0].kind == "abort"
        assert loop.has_failed.result(0) is False


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_one_request_that_breaks_every_step_ends_with_its_own_error(overlaps: bool) -> None:
    """Its neighbours run to their ends, within the bounds of a default server."""
    executor = LosingExecutor()
    executor.poison = POISON
    with recovering(executor, most=3, overlaps=overlaps) as loop:
        innocent = [run(loop, request(f"r{i}", (10 * i,), max_new_tokens=30)) for i in range(3)]
        guilty = run(loop, request("guilty", (1, POISON), max_new_tokens=8))
        ends = [each.read_all()[0].kind for each in innocent]
        (end,) = guilty.read_all()
        assert ends == ["length"] * 3
        assert end is not None and end.kind == "error" and "host 1 failed" in (end.message or "")
        loop.check_integrity()


def test_suspects_that_fail_together_are_tried_by_halves() -> None:
    """All of a step are suspected: only trials tell them apart, and trials are not held against the bounds."""
    executor = LosingExecutor()
    executor.poison = POISON
    with recovering(executor, most=3, max_running_requests=8, max_step_tokens=64) as loop:
        loop.control.pause("in_place").result(TIMEOUT_S)
        names = [f"r{i}" for i in range(7)]
        listeners = {"guilty": run(loop, request("guilty", (1, POISON), max_new_tokens=5))}
        for i, name in enumerate(names):
            listeners[name] = run(loop, request(name, (10 * i + 1,), max_new_tokens=5))
        loop.control.resume()
        ends = {name: listener.read_all()[0].kind for name, listener in listeners.items()}
        assert ends == dict.fromkeys(names, "length") | {"guilty": "error"}
        assert executor.num_rebuilds > 3
        assert run(loop, request("later", (5,))).read_all()[0].kind == "length"


def test_a_request_that_is_tried_can_be_aborted_and_the_others_go_on() -> None:
    executor = LosingExecutor()
    executor.poison = POISON
    with recovering(executor, most=1000, max_running_requests=8) as loop:
        loop.control.pause("in_place").result(TIMEOUT_S)
        fine = [run(loop, request(f"r{i}", (10 * i + 1,), max_new_tokens=5)) for i in range(4)]
        guilty = run(loop, request("guilty", (1, POISON), max_new_tokens=5))
        loop.control.resume()
        loop.abort_stem("guilty")
        assert [each.read_all()[0].kind for each in fine] == ["length"] * 4
        assert guilty.read_all()[0].kind in ("abort", "error")


@pytest.mark.parametrize("when", ["reading", "before the change", "in the change"])
def test_an_update_that_a_loss_meets_is_not_done_and_says_so(when: str) -> None:
    executor = LosingExecutor()
    with recovering(executor) as loop:
        executor.may_stage.clear()
        update = loop.control.update_weights(WeightOrder(LOST_PATH if when == "reading" else "/second", "2"))
        assert executor.in_stage.wait(TIMEOUT_S)
        if when == "before the change":
            executor.lose_idle()
            loop.check_integrity()
        if when == "in the change":
            executor.losses = frozenset([executor.num_calls + 1])
        executor.may_stage.set()
        outcome = update.result(TIMEOUT_S)
        assert not outcome.success and "a host was lost" in outcome.message and "old weights stay" in outcome.message
        assert (outcome.weight_version, loop.card.weight_version, executor.serving) == ("0", "0", "first")
        assert executor.num_rebuilds == 1
        executor.losses = frozenset()
        assert loop.control.update_weights(WeightOrder("/third", "3")).result(TIMEOUT_S).success
        executor.lose_idle()
        loop.check_integrity()
        assert executor.serving == "/third", "hosts that follow load the weights that served last"
        assert run(loop, request()).read_all()[0].kind == "length"


LATER_WAIT_S = 2.0
"""Over ten times what three rebuilds without a wait take."""


def test_the_waits_grow_only_while_nothing_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "WAITS_S", (0.0, LATER_WAIT_S))
    executor = LosingExecutor(frozenset([3, 9, 15]))
    with recovering(executor) as loop:
        begun = time.monotonic()
        assert run(loop, request(max_new_tokens=20)).read_all()[0].kind == "length"
        assert executor.num_rebuilds == 3 and time.monotonic() - begun < LATER_WAIT_S, "it did wait"
        executor.num_failing = 4
        executor.lose_idle()
        loop.check_integrity()
        assert executor.num_rebuilds == 5 and time.monotonic() - begun > LATER_WAIT_S
