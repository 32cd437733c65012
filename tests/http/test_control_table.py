"""Every control route with one replica, with several, and with one replica silent.

Adapters have a file of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.fleet.broadcast import Answer, Answers, Refusal
from rayserve_moe.serving.control.commands import COMMANDS
from rayserve_moe.serving.control.fleet import fault_of
from tests.support.serving.local_fleet import local_fleet

WEIGHTS = "of another checkpoint"


@dataclass(frozen=True)
class Row:
    """What a path is sent, answers, and asks of the replicas."""

    answer: dict[str, Any]
    calls: tuple[str, ...] = ()
    body: dict[str, Any] | None = None
    is_paused: bool = False
    """Whether the replicas are paused by it, or have been by its counterpart."""
    silent: int = 503
    """Status while a replica does not answer."""


PAUSED = {"success": True, "message": "generation is paused"}
GOES_ON = {"success": True, "message": "generation goes on"}
FLUSHED = Row({"success": True, "message": "the cache is flushed"}, ("flush",), {})
UPDATED = {"success": True, "num_paused_requests": 0}
STAGED = ("stage", "follow")
BRACKET = Row(
    {
        "success": True,
        "message": "weights change between two steps, once all of them are there: nothing is to be begun or ended",
    }
)
ROWS = {
    "/abort_request": Row({"success": True}, ("abort",), {"rid": "unknown"}),
    "/abort_requests": Row({"status": "aborted", "aborted": 2}, ("abort",) * 2, {"request_ids": ["one", "other"]}),
    "/inference/v1/abort_requests": Row({"status": "aborted", "aborted": 0}, ("abort_all",), {}),
    "/flush_cache": FLUSHED,
    "/reset_prefix_cache": FLUSHED,
    "/pause_generation": Row({**PAUSED, "status": "ok"}, ("follow",), {"mode": "in_place"}, is_paused=True),
    "/areal_pause_generation": Row(PAUSED, ("follow",), is_paused=True),
    "/pause": Row({"status": "paused"}, ("hold_new", "num_unended", "follow", "flush"), {"mode": "wait"}, True),
    "/continue_generation": Row({**GOES_ON, "status": "ok"}, ("follow",)),
    "/areal_continue_generation": Row(GOES_ON, ("follow",)),
    "/resume": Row({"status": "resumed"}, ("follow",)),
    "/is_paused": Row({"is_paused": False}),
    "/is_sleeping": Row({"is_sleeping": False}),
    "/update_weights_from_disk": Row(UPDATED, STAGED, {"model_path": WEIGHTS}, silent=400),
    "/areal_update_weights": Row(UPDATED, STAGED, {"model_path": WEIGHTS, "weight_version": "9"}, silent=400),
    "/update_weights": Row(UPDATED, STAGED, {"weight_dir": WEIGHTS}, silent=400),
    "/update_weight_version": Row(
        {"success": True, "message": "the weights are renamed", "new_version": "seven"},
        ("follow",),
        {"new_version": "seven"},
    ),
    "/begin_weight_update": BRACKET,
    "/end_weight_update": BRACKET,
}


@pytest.fixture
def others(engine, second_engine, checkpoint):
    """The engines as they were, afterwards too."""

    def reset():
        for one in (engine, second_engine):
            one.loop.control.resume().result()
            if one.loop.card.weight_version != "0":
                assert one.loop.control.update_weights(WeightOrder(str(checkpoint), "0")).result().success

    reset()
    yield (engine, second_engine)
    reset()


def ask(client, path, row: Row, checkpoint):
    """Send what the row has."""
    method = COMMANDS[path][-1].methods[0]
    body = None if row.body is None else {k: str(checkpoint) if v == WEIGHTS else v for k, v in row.body.items()}
    return client.request(method, path, json=body)


def check(row: Row, answer, engines):
    assert answer.status_code == 200, answer.text
    assert row.answer.items() <= answer.json().items()
    assert [one.loop.control.is_paused for one in engines] == [row.is_paused] * len(engines)
    named = answer.json().get("new_version", answer.json().get("weight_version", "0"))
    assert {one.loop.card.weight_version for one in engines} == {named}
    assert row.body is None or named == {"seven": "seven", "9": "9"}.get(
        row.body.get("new_version", row.body.get("weight_version", "")), "1" if WEIGHTS in row.body.values() else "0"
    )


def test_every_row_is_here():
    assert set(ROWS) == {path for path in COMMANDS if "_lora_" not in path}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ROWS)
def test_a_row_for_a_replica_by_itself(path, http, others, other_checkpoint):
    check(ROWS[path], ask(http, path, ROWS[path], other_checkpoint), others[:1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", ROWS)
def test_a_row_for_several_replicas(path, others, other_checkpoint):
    """Whichever is asked, all do it; if one does not answer, it is named."""
    row = ROWS[path]
    with local_fleet(dict(zip("ab", others, strict=True))) as fleet:
        if row.calls:
            fleet.calls.silent = {"b"}
            refused = ask(fleet["a"], path, row, other_checkpoint)
            assert refused.status_code == row.silent and "replica b did not answer" in refused.text
            fleet.calls.silent = set()
            fleet.sync()  # what was decided is followed
            assert fleet["a"].post("/continue_generation").status_code == 200
            assert fleet["a"].post("/update_weight_version", json={"new_version": "0"}).status_code == 200
        fleet.calls.asked.clear()
        check(row, ask(fleet["b"], path, row, other_checkpoint), others)
        assert tuple(fleet.calls.asked) == row.calls


@pytest.mark.parametrize(
    ("answers", "missing", "missing_first", "fault"),
    [
        ({"a": Answer("a", "")}, (), True, ""),
        ({"a": Answer("a", ""), "b": Answer("b", "its disk is full")}, (), True, "replica b: its disk is full"),
        ({"a": Answer("a", WeightOutcome(False, "no", "0"))}, (), False, "replica a: no"),
        ({"a": Answer("a", WeightOutcome(False, "", "0"))}, (), False, "replica a: failed"),
        ({"a": Answer("a", WeightOutcome(True, "", "0"))}, (), False, ""),
        ({"a": Answer("a", refusal=Refusal(409, "late"))}, ("b", "c"), True, "replicas b, c did not answer"),
        ({"a": Answer("a", refusal=Refusal(409, "late"))}, ("b", "c"), False, "replica a: late"),
        ({}, ("b",), False, "replica b did not answer"),
    ],
)
def test_why_not_all_replicas_have_done_it(answers, missing, missing_first, fault):
    assert fault_of(Answers(answers, missing), missing_first=missing_first) == fault
