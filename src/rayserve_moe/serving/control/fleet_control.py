"""Control of all replicas from any of them. A command succeeds only when every replica has confirmed it.

Weights change in two phases: all replicas stage, then the state actor commits and all follow. A replica lost in between
restarts with the committed state, and a replica whose caller is lost follows by itself.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from rayserve_moe.engine.control import WeightOrder, WeightOutcome, following_version
from rayserve_moe.fleet.broadcast import Answer, Answers
from rayserve_moe.fleet.member import StateUnavailableError
from rayserve_moe.fleet.wanted_state import LEASE_S, FleetView, ServedWeights, Wanted
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.control.replica_calls import CALLS
from rayserve_moe.serving.errors import ApiError

READ_S = 5.0
CHANGE_S = 60.0
"""Timeout of a change that replicas apply between two steps."""
STAGING_SLACK_S = 30.0
DISCARD_S = 5.0
_POLL_S = 0.1


async def ask_all(state: ApiState, call: str, *arguments: Any, timeout_s: float = READ_S) -> Answers:
    """Return the answers of all replicas to a call of `replica_calls`.

    A single replica answers directly, with an empty name, and its exceptions propagate.

    Raises: ApiError 503 if Serve cannot list the replicas.
    """
    fleet = state.fleet
    if fleet is None or fleet.member.is_single_replica:
        return Answers({"": Answer("", await CALLS[call](state, *arguments))})
    try:
        return await fleet.calls.ask(call, *arguments, timeout_s=timeout_s, members=lambda: fleet.member.view.members)
    except StateUnavailableError as error:
        raise _unknown() from error


async def ask_every(state: ApiState, call: str, *arguments: Any, timeout_s: float = CHANGE_S) -> list[Any]:
    """Return the values of all replicas' answers.

    Raises: ApiError if a replica rejects the call, 503 if a replica does not answer.
    """
    return list(values_of(await ask_all(state, call, *arguments, timeout_s=timeout_s)).values())


def values_of(answers: Answers) -> dict[str, Any]:
    """Return the values by replica.

    Raises: ApiError if a replica rejects the call, 503 if a replica does not answer.
    """
    if answers.missing:
        raise ApiError(503, missing_sentence(answers.missing), code="replica_missing")
    if (refused := answers.refused) is not None and refused.refusal is not None:
        raise ApiError(refused.refusal.status, sentence_of(refused), code=refused.refusal.code)
    return answers.values_by_replica


def missing_sentence(missing: tuple[str, ...]) -> str:
    """Return a sentence with the replicas that did not answer."""
    return f"{'replicas' if len(missing) > 1 else 'replica'} {', '.join(missing)} did not answer"


def sentence_of(answer: Answer) -> str:
    """Return a sentence with the replica that rejects and its reason."""
    return f"replica {answer.replica}: {answer.refusal.message if answer.refusal else answer.value}"


async def pause_all(state: ApiState, mode: str | None) -> None:
    """Pause every replica, including replicas that start later, or end a pause (None).

    Raises: ApiError 503 with the replicas that did not answer.
    """
    control, fleet = state.loop.control, state.fleet
    if fleet is None:
        await asyncio.wrap_future(control.resume() if mode is None else control.pause(mode))
        return
    wanted = await _changed(fleet, "pause", mode) or _next(fleet, pause=mode)
    await ask_every(state, "follow", wanted)


async def update_all(state: ApiState, order: WeightOrder) -> WeightOutcome:
    """Load a checkpoint on all replicas, or on none.

    If any replica cannot read it, the old weights serve on everywhere.
    """
    if state.fleet is None:
        return await asyncio.wrap_future(state.loop.control.update_weights(order))
    async with ordered(state, state.fleet) as (order_id, view):
        if is_lone(state.fleet, view):
            outcome = await asyncio.wrap_future(state.loop.control.update_weights(order))
            return await note_own(state, order_id, path=order.model_path, outcome=outcome)
        limit_s = state.fleet.staging_timeout_s + STAGING_SLACK_S
        staged = await ask_all(state, "stage", order_id, order.model_path, timeout_s=limit_s)
        if fault := fault_of(staged):
            await discard(state, order_id)
            return WeightOutcome(False, f"{fault}: the old weights serve on", state.card.weight_version)
        version = order.weight_version or following_version(state.loop.control)
        weights = ServedWeights(order_id, order.model_path, version, order.aborts_requests)
        return await decide(state, order_id, weights=weights)


async def rename_all(state: ApiState, version: str, *, aborts_requests: bool) -> None:
    """Set the version of the weights on all replicas."""
    if state.fleet is None:
        await asyncio.wrap_future(state.loop.control.rename_weights(version, aborts_requests=aborts_requests))
        return
    async with ordered(state, state.fleet) as (order_id, view):
        served = state.fleet.member.applied.weights if view is None else view.wanted.weights
        weights = replace(served, version=version, aborts_requests=aborts_requests)
        if view is None:
            await asyncio.wrap_future(state.loop.control.rename_weights(version, aborts_requests=aborts_requests))
            _note_alone(state.fleet, weights)
        else:
            await decide(state, order_id, weights=weights)


def fault_of(answers: Answers) -> str:
    """Return the reason why a replica did not stage, missing replicas first; empty if all did."""
    if answers.missing:
        return missing_sentence(answers.missing)
    if (refused := answers.refused) is not None:
        return sentence_of(refused)
    return next((f"replica {name}: {one.value}" for name, one in answers.by_replica.items() if one.value), "")


async def decide(state: ApiState, order_id: str, *, weights: ServedWeights) -> WeightOutcome:
    """Commit the staged weights on all replicas.

    Raises: ApiError 503 if a replica has not followed; it, or its successor, will.
    """
    assert state.fleet is not None, "a fleet decides"
    wanted = await _changed(state.fleet, "commit", order_id, weights)
    if wanted is None:
        await discard(state, order_id)
        return WeightOutcome(False, "the order has ended: the old weights serve on", state.card.weight_version)
    answers = await ask_all(state, "follow", wanted, timeout_s=CHANGE_S)
    refused = answers.refused
    if answers.missing or refused is not None:
        who = missing_sentence(answers.missing) if refused is None else sentence_of(refused)
        raise ApiError(503, f"{who}; version {weights.version} serves everywhere else", code="replica_missing")
    outcomes, gap_s = answers.values, max(one.gap_s for one in answers.values)
    num_paused = sum(outcome.num_paused for outcome in outcomes)
    return WeightOutcome(True, "the new weights serve", outcomes[0].weight_version, num_paused, gap_s)


async def discard(state: ApiState, order_id: str) -> None:
    """Drop the staged weights on all replicas; a replica that does not answer drops them by itself."""
    await ask_all(state, "discard", order_id, timeout_s=DISCARD_S)


def is_lone(fleet: Fleet, view: FleetView | None) -> bool:
    """Return True if no other replica has joined; without a view, by this replica's own knowledge."""
    return fleet.member.is_single_replica if view is None else view.members <= {fleet.member.name}


async def note_own(state: ApiState, order_id: str, *, path: str | None, outcome: WeightOutcome) -> WeightOutcome:
    """Publish the outcome of an update by a single replica, and return it."""
    if outcome.success and state.fleet is not None:
        weights = ServedWeights(order_id, path, outcome.weight_version)
        wanted = await _changed(state.fleet, "commit", order_id, weights)
        if wanted is None:
            _note_alone(state.fleet, weights)
        else:
            state.fleet.member.record(wanted)
    return outcome


@asynccontextmanager
async def ordered(state: ApiState, fleet: Fleet) -> AsyncGenerator[tuple[str, FleetView | None]]:
    """Hold the fleet's lease on weight orders; yield its id and the fleet view.

    The view is None for a lone replica without the state actor.

    Raises: ApiError 503 if another order does not end in time.
    """
    order_id, deadline = uuid.uuid4().hex, time.monotonic() + CHANGE_S
    view = None
    while view is None:
        try:
            view = await fleet.state.ask("begin", order_id)
        except StateUnavailableError as error:
            if fleet.member.is_single_replica:
                break
            raise _unknown() from error
        if view is None and time.monotonic() > deadline:
            raise ApiError(503, "another update of the weights runs", code="update_running")
        await asyncio.sleep(0 if view else _POLL_S)
    renewing = asyncio.create_task(_renew(fleet, order_id))
    try:
        yield order_id, view
    finally:
        renewing.cancel()
        with suppress(StateUnavailableError):
            await asyncio.shield(fleet.state.ask("end", order_id))


async def _renew(fleet: Fleet, order_id: str) -> None:
    while True:
        await asyncio.sleep(LEASE_S / 5)
        with suppress(StateUnavailableError):
            await fleet.state.ask("renew", order_id)


async def _changed(fleet: Fleet, method: str, *arguments: Any) -> Wanted | None:
    """Change the fleet state. Without the actor, a lone replica returns None and restores the state later."""
    try:
        wanted = await fleet.state.ask(method, *arguments)
    except StateUnavailableError as error:
        if fleet.member.is_single_replica:
            return None
        raise _unknown() from error
    return wanted


def _note_alone(fleet: Fleet, weights: ServedWeights) -> None:
    fleet.member.record(_next(fleet, weights=weights))


def _next(fleet: Fleet, **changes: Any) -> Wanted:
    return replace(fleet.member.applied, number=fleet.member.applied.number + 1, **changes)


def _unknown() -> ApiError:
    return ApiError(503, "the state of the fleet is unavailable: try again later", code="no_state")
