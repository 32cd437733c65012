"""A replica that ends hands requests over that the journal keeps, and completes the others."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.fleet.member import Leaving
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.serving.journalling import hand_over
from tests.http.test_journal import (
    MANY,
    NATIVE,
    RESUME,
    Pair,
    all_events,
    assert_same,
    events_in,
    last_answers,
    pair,
    told_of,
)
from tests.support.engine import step_gate
from tests.support.serving.http_client import GENERATE, wait_until
from tests.support.serving.http_server import running
from tests.support.serving.local_fleet import local_fleet

__all__ = ["pair"]


def answers_of(found: Any) -> list[dict[str, Any]]:
    return found if isinstance(found, list) else [found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("body", [NATIVE, MANY], ids=["one choice", "three choices"])
def test_streams_and_plain_answers_go_on_at_the_other_replica_and_the_unnamed_is_completed(pair, body):
    loop = pair.engines["a"].loop
    wanted = pair["b"].post(GENERATE, json=body).json()
    with ThreadPoolExecutor(3) as beside, ExitStack() as closing:
        with step_gate.unhurried(loop), step_gate.held_steps(loop) as gate:
            opened = beside.submit(
                closing.enter_context, pair["a"].stream("POST", GENERATE, json={**body, "rid": "s", "stream": True})
            )
            plain = beside.submit(pair["a"].post, GENERATE, json={**body, "rid": "plain"})
            unnamed = beside.submit(pair["a"].post, GENERATE, json=body)
            gate.let_run(4)
            events = events_in(opened.result())
            begun = [next(events)]
            wait_until(lambda: len(pair.journals["a"].tickets) == 2)
            assert hand_over(pair.journals["a"]) == 2 and hand_over(pair.journals["a"]) == 0
            begun += events
        *begun, (_, last) = begun
        assert last["error"]["code"] == "handed_over"
        refused = plain.result()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "handed_over"
        assert int(refused.headers["Retry-After"]) > 0
        assert unnamed.result().json()["output_ids" if body is NATIVE else 0]
        rest = all_events(pair["b"], RESUME, {"rid": "s", "from_token": told_of(begun[-1][0])})
        for one, other in zip(answers_of(wanted), last_answers(rest).values(), strict=True):
            assert_same(one, other)
        found = pair["b"].post(RESUME, json={"rid": "plain"}).json()
        for one, other in zip(answers_of(wanted), answers_of(found), strict=True):
            assert_same(one, other)


def test_nothing_is_handed_over_to_a_journal_that_is_lost(pair):
    loop = pair.engines["a"].loop
    with ThreadPoolExecutor(1) as beside, step_gate.unhurried(loop), step_gate.held_steps(loop) as gate:
        asked = beside.submit(pair["a"].post, GENERATE, json={**NATIVE, "rid": "stays"})
        gate.let_run(4)
        pair.journal.end()
        wait_until(lambda: not pair.journals["a"].is_up)
        assert hand_over(pair.journals["a"]) == 0
        pair.journal.start()
        gate.open()
        assert asked.result().status_code == 200


def test_a_request_that_is_handed_over_while_its_constraint_is_compiled_ends(pair, monkeypatch):
    compiled, submitted = Future(), []
    constraints = pair.engines["a"].loop.constraints
    monkeypatch.setattr(constraints, "submit", lambda _: submitted.append(0) or compiled)
    sampling = {"max_new_tokens": 4, "regex": "[0-9]+"}
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(pair["a"].post, GENERATE, json={**NATIVE, "sampling_params": sampling, "rid": "early"})
        wait_until(lambda: submitted)
        assert hand_over(pair.journals["a"]) == 1
        monkeypatch.undo()
        compiled.set_result(None)
        assert asked.result().json()["error"]["code"] == "handed_over"


def front_over(pair: Pair) -> ASGIApp:
    """New requests reach `a`, and those that are resumed `b`."""

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        await pair.apps["a" if scope["path"] == GENERATE else "b"](scope, receive, send)

    return front


def test_the_rollout_client_goes_on_by_itself(pair):
    sampling = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 1.0}
    asked = SampleRequest("p", [5, 6, 7], sampling, seed=3, count=2)
    loop = pair.engines["a"].loop
    with running(front_over(pair)) as url, BlockingRolloutClient(url, api_key="mine") as client, ExitStack() as closing:
        beside = closing.enter_context(ThreadPoolExecutor(1))
        with step_gate.unhurried(loop), step_gate.held_steps(loop) as gate:
            answered = beside.submit(client.generate, [asked])
            gate.let_run(4)
            assert hand_over(pair.journals["a"]) == 1
        (found,) = answered.result()
    with BlockingRolloutClient(str(pair["b"].base_url), api_key="mine") as client:
        (wanted,) = client.generate([asked])
    for one, other in zip(found, wanted, strict=True):
        assert one.output_ids.tolist() == other.output_ids.tolist() and one.finish_reason == other.finish_reason
        np.testing.assert_array_equal(one.routing.rows, other.routing.rows)


def test_a_replica_that_serve_stops_looks_every_second(engine, second_engine):
    handed_over = []
    with local_fleet({"a": engine, "b": second_engine}) as fleet:
        server = ServerSettings(hand_over_after_s=0)
        fleet.member("a").on_listed = Leaving("a", lambda: len(handed_over.append(0) or []), server).look
        fleet.sync()
        assert not handed_over
        fleet.calls.listed["a"] = "STOPPING"
        fleet.sync()
        fleet.sync()
        assert len(handed_over) == 2
