"""Who may change what a fleet serves, and who may join: never one that misses an order."""

from __future__ import annotations

import pytest

from rayserve_moe.fleet.broadcast import Answer, Refusal, collect, expected_of
from rayserve_moe.fleet.wanted_state import LEASE_S, RESTORE_S, ServedWeights, Wanted, WantedState

NEW = ServedWeights("a", "/new", "7")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> WantedState:
    found = WantedState(clock)
    clock.now = RESTORE_S
    return found


def test_one_order_runs_at_a_time_and_only_that_one_decides(state: WantedState) -> None:
    assert state.begin("a") is not None and state.begin("b") is None
    assert state.commit("b", NEW) is None and state.view().wanted == Wanted()
    wanted = state.commit("a", NEW)
    assert wanted == Wanted(1, NEW) and state.view().wanted == wanted
    state.end("b")
    assert state.view().order_id == "a"
    state.end("a")
    assert state.begin("b") is not None


def test_an_order_whose_replica_is_lost_ends_undecided(state: WantedState, clock: Clock) -> None:
    state.begin("a")
    clock.now += LEASE_S
    assert state.renew("a")
    clock.now += LEASE_S + 1
    assert state.view().order_id is None and not state.renew("a")
    assert state.commit("a", NEW) is None and state.view().wanted == Wanted()


def test_no_replica_joins_past_an_order_or_without_what_is_wanted(state: WantedState) -> None:
    state.begin("a")
    assert not state.join("x", 0)
    state.commit("a", NEW)
    state.end("a")
    assert not state.join("x", 0) and state.join("x", 1)
    assert state.view().members == {"x"}
    paused = state.pause("retract")
    assert paused.number == 2 and paused.weights == NEW
    assert not state.join("y", 1) and state.join("y", 2)


def test_a_pause_does_not_wait_for_an_order_nor_is_lost_with_it(state: WantedState) -> None:
    state.begin("a")
    assert state.pause("abort").number == 1
    wanted = state.commit("a", NEW)
    assert wanted == Wanted(2, NEW, "abort")


def test_an_actor_that_was_lost_takes_over_what_replicas_have_before_others_join(clock: Clock) -> None:
    state = WantedState(clock)
    assert not state.join("late", 0)
    assert state.restore(Wanted(5, NEW, "abort")) == Wanted(5, NEW, "abort")
    assert state.restore(Wanted(4)) == Wanted(5, NEW, "abort")
    assert state.join("old", 5) and not state.join("late", 0)


def test_weights_that_were_sent_are_given_up_only_when_all_replicas_are_gone(state: WantedState) -> None:
    sent = ServedWeights("a", None, "7")
    state.join("x", 0)
    state.begin("a")
    number = state.commit("a", sent).number
    state.end("a")
    assert state.abandon(number).weights == sent
    state.forget(["x"])
    assert state.abandon(number - 1).weights == sent
    assert state.abandon(number) == Wanted(number + 1, ServedWeights(awaited="7"))


def test_weights_that_are_awaited_are_so_through_further_losses_until_others_are_decided(state: WantedState) -> None:
    state.begin("a")
    number = state.commit("a", ServedWeights("a", None, "7")).number
    state.end("a")
    awaiting = state.abandon(number)
    assert state.abandon(number) == awaiting, "the second replica that finds it out changes nothing"
    assert state.join("x", awaiting.number) and state.pause("abort").weights.awaited == "7"
    state.forget(["x"])
    assert state.view().wanted.weights.awaited == "7"
    state.begin("b")
    assert state.commit("b", NEW).weights.awaited == ""


def test_who_has_not_answered_is_named_and_errors_are_no_answers() -> None:
    found = collect([Answer("b", 2), RuntimeError("lost"), Answer("a", refusal=Refusal(400, "no"))], {"a", "b", "c"})
    assert list(found.by_replica) == ["a", "b"] and found.missing == ("c",)
    assert found.values == [2] and found.refused == Answer("a", refusal=Refusal(400, "no"))


def test_replicas_that_stop_are_not_waited_for_and_those_that_start_only_once_they_have_joined() -> None:
    listed = {"a": "RUNNING", "b": "STOPPING", "c": "STARTING", "d": "STARTING", "e": "UPDATING"}
    assert expected_of(listed, {"a", "b", "d"}) == {"a", "d", "e"}


def test_the_first_to_join_compute_prompts_and_a_lost_one_leaves_its_role(state: WantedState) -> None:
    for member in ("x", "y", "x"):
        assert state.join(member, 0, num_prefill=1)
    assert state.view().prefill == {"x"}
    state.forget(["x"])
    assert state.view().prefill == frozenset()
    assert state.join("y", 0, num_prefill=1) and not state.view().prefill, "a member keeps its role"
    assert state.join("z", 0, num_prefill=1) and state.view().prefill == {"z"}


def test_a_restarted_actor_learns_the_roles_from_their_holders(clock: Clock) -> None:
    state = WantedState(clock)
    clock.now += RESTORE_S
    assert state.join("decodes", 0) and state.join("prefills", 0, num_prefill=1 << 30)
    assert state.join("late", 0, num_prefill=1)
    assert state.view().prefill == {"prefills"}
