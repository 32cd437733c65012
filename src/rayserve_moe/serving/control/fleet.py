"""All replicas of the application, called from any of them. A command succeeds only once every replica confirms it.

Weights change in two phases: all replicas stage, then the state actor commits and all follow. A replica lost in between
restarts with the committed state, and a replica whose caller is lost follows by itself.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rayserve_moe.checkpoints.bucket import SentAdapter, SentShares
from rayserve_moe.engine.control import EngineControl, WeightOrder, WeightOutcome, following_version
from rayserve_moe.engine.updates.tensors import AnyBucket, BucketOrder, UpdateConflictError
from rayserve_moe.fleet.broadcast import Answer, Answers
from rayserve_moe.fleet.member import FleetMember, StateUnavailableError
from rayserve_moe.fleet.wanted_state import LEASE_S, FleetView, ServedWeights, Wanted
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.membership import Membership
from rayserve_moe.serving.control.replica_calls import CALLS
from rayserve_moe.serving.errors import ApiError

READ_S = 5.0
CHANGE_S = 60.0
"""Timeout of a change that replicas apply between two steps."""
STAGING_SLACK_S = 30.0
DISCARD_S = 5.0
_POLL_S = 0.1
Sent = bytearray | dict[str, SentShares]
"""Bucket to forward: its body, or the shares cut by its sender, by replica."""


@dataclass(frozen=True)
class Fleet:
    """All replicas, as seen from one of them; an engine without Serve is a single replica."""

    state: ApiState

    async def call(self, name: str, *arguments: Any, timeout_s: float = READ_S) -> Answers:
        """Return the answers of all replicas to a call of `replica_calls`.

        A single replica answers directly, with an empty name, and its exceptions propagate.

        Raises: ApiError 503 if Serve cannot list the replicas.
        """
        membership = self.state.membership
        if membership is None or membership.member.is_single_replica:
            return Answers({"": Answer("", await CALLS[name](self.state, *arguments))})
        member = membership.member
        try:
            return await membership.calls.ask(
                name, *arguments, timeout_s=timeout_s, members=lambda: member.view.members
            )
        except StateUnavailableError as error:
            raise _unknown() from error

    async def report(self, name: str) -> Answers:
        """Return the answers of all replicas, with the number of replicas that Serve keeps up.

        A single replica answers without a name, but under its name while Serve replaces the others.

        Raises: ApiError 503 if Serve cannot list the replicas.
        """
        answers = await self.call(name)
        if (alone := answers.by_replica.get("")) is None or (membership := self.state.membership) is None:
            return answers
        num_wanted = await membership.calls.num_wanted()
        if num_wanted is None or num_wanted < 2:
            return answers
        own = membership.member.name
        return Answers({own: Answer(own, alone.value)}, num_wanted=num_wanted)

    async def every(self, name: str, *arguments: Any, timeout_s: float = CHANGE_S) -> list[Any]:
        """Return the values of all replicas' answers.

        Raises: ApiError if a replica rejects the call, 503 if a replica does not answer.
        """
        return list(values_of(await self.call(name, *arguments, timeout_s=timeout_s)).values())

    async def pause(self, mode: str | None) -> None:
        """Pause every replica, including replicas that start later, or end a pause (None).

        Raises: ApiError 503 with the replicas that did not answer.
        """
        if (membership := self.state.membership) is None:
            await asyncio.wrap_future(self._control.resume() if mode is None else self._control.pause(mode))
            return
        wanted = await _changed(membership, "pause", mode) or _next(membership.member, pause=mode)
        await self.every("follow", wanted)

    async def update_weights(self, order: WeightOrder) -> WeightOutcome:
        """Load a checkpoint on all replicas, or on none.

        If any replica cannot read it, the old weights serve on everywhere.
        """
        own = partial(self._control.update_weights, order)
        return await self._switch(order, own, partial(self._stage_path, order.model_path), path=order.model_path)

    async def stage_bucket(self, bucket: AnyBucket, *, sent: Sent, order: BucketOrder) -> WeightOutcome:
        """Stage a bucket on all replicas; after the last one all replicas switch to the sent weights, or none does.

        The receiver of a bucket forwards it.

        Raises: UpdateConflictError if a bucket does not follow a replica's buckets; all replicas drop the update then.
        """
        own = partial(self._control.tensors.stage, bucket, order)
        if order.is_last:
            return await self._switch(order.order, own, partial(self._stage_sent, sent, order), path=None)
        membership = self.state.membership
        if membership is None or membership.member.is_single_replica:
            return await asyncio.wrap_future(own())
        return await self._stage_sent(sent, order, "")

    async def load_adapter(self, adapter: SentAdapter, name: str, *, path: str, sent: bytearray) -> WeightOutcome:
        """Hold an adapter beside the weights on all replicas; `sent` is its body.

        A replica without it answers requests of its name with an error. Loads through several replicas are applied in
        the same order everywhere.
        """
        assert self._control.adapters is not None, "this server holds adapters"
        membership = self.state.membership
        if membership is None or membership.member.is_single_replica:
            outcome = await asyncio.wrap_future(self._control.adapters.load(adapter, name, path=path))
            if membership is None or membership.member.is_single_replica or not outcome.success:
                return outcome
            # A replica that joined meanwhile may have copied the adapters before this one was loaded.
        passed_on = await asyncio.to_thread(membership.calls.put, sent)
        return await self._outcome("load_adapter", name, path, passed_on)

    async def unload_adapter(self, name: str) -> WeightOutcome:
        """Unload an adapter on all replicas, in the same order as loads; they reject its later requests."""
        return await self._outcome("unload_adapter", name)

    async def _outcome(self, name: str, *arguments: Any) -> WeightOutcome:
        """Apply a change on all replicas, in the same order as other changes; return its outcome."""
        membership = self.state.membership
        async with nullcontext() if membership is None else _ordered(membership):
            answers = await self.call(name, *arguments, timeout_s=CHANGE_S)
        fault = fault_of(answers, missing_first=False)
        return WeightOutcome(False, fault, self.state.card.weight_version) if fault else answers.values[0]

    async def rename_weights(self, version: str, *, aborts_requests: bool) -> None:
        """Set the version of the weights on all replicas."""
        own = partial(self._control.rename_weights, version, aborts_requests=aborts_requests)
        if (membership := self.state.membership) is None:
            await asyncio.wrap_future(own())
            return
        async with _ordered(membership) as (order_id, view):
            served = membership.member.applied.weights if view is None else view.wanted.weights
            weights = replace(served, version=version, aborts_requests=aborts_requests)
            if view is None:
                await asyncio.wrap_future(own())
                membership.member.record(_next(membership.member, weights=weights))
            else:
                await self._decide(membership, order_id, weights=weights)

    @property
    def _control(self) -> EngineControl:
        return self.state.loop.control

    async def _switch(
        self,
        order: WeightOrder,
        own: Callable[[], Future[WeightOutcome]],
        stage: Callable[[str], Awaitable[WeightOutcome]],
        *,
        path: str | None,
    ) -> WeightOutcome:
        """Change the weights: a single replica by `own`, several in two phases that begin with `stage`.

        `path` is the checkpoint's; None for sent weights.
        """
        if (membership := self.state.membership) is None:
            return await asyncio.wrap_future(own())
        async with _ordered(membership) as (order_id, view):
            if _is_lone(membership.member, view):
                outcome = await asyncio.wrap_future(own())
                if outcome.success:
                    served = ServedWeights(order_id, path, outcome.weight_version, adapter=order.adapter)
                    await _publish(membership, order_id, served)
                return outcome
            staged = await stage(order_id)
            if not staged.success:
                return staged
            version = order.weight_version or following_version(self._control)
            weights = ServedWeights(order_id, path, version, order.aborts_requests, adapter=order.adapter)
            decided = await self._decide(membership, order_id, weights=weights)
            return replace(decided, max_rounding=staged.max_rounding)

    async def _stage_path(self, path: str, order_id: str) -> WeightOutcome:
        """Have all replicas stage a checkpoint; if any does not, all drop it."""
        staged = await self.call("stage", order_id, path, timeout_s=self._staging_timeout_s)
        fault = fault_of(staged, missing_first=True)
        if fault:
            await self._discard(order_id)
            return self._refused(fault)
        return WeightOutcome(True, "", self.state.card.weight_version)

    async def _stage_sent(self, sent: Sent, order: BucketOrder, order_id: str) -> WeightOutcome:
        """Forward a bucket to all replicas; if any does not stage it, all drop the update."""
        assert self.state.membership is not None, "a fleet stages"
        update_id = order.update_id
        number = self._control.tensors.num_staged(update_id) if order.number is None else order.number
        calls = self.state.membership.calls
        passed_on = sent if isinstance(sent, dict) else await asyncio.to_thread(calls.put, sent)
        limit_s = self._staging_timeout_s
        staged = await self.call("bucket", update_id, number, passed_on, order_id, timeout_s=limit_s)
        if fault := fault_of(staged, missing_first=False):
            await self._discard(order_id)
            await self.call("drop_update", update_id)
            if (
                staged.refused is not None
                and staged.refused.refusal is not None
                and staged.refused.refusal.status == 409
            ):
                raise UpdateConflictError(fault)
            return self._refused(fault)
        return staged.values[0]

    async def _decide(self, membership: Membership, order_id: str, *, weights: ServedWeights) -> WeightOutcome:
        """Commit the staged weights on all replicas.

        Raises: ApiError 503 if a replica has not followed; it, or its successor, will.
        """
        wanted = await _changed(membership, "commit", order_id, weights)
        if wanted is None:
            await self._discard(order_id)
            return self._refused("the order has ended")
        answers = await self.call("follow", wanted, timeout_s=CHANGE_S)
        if who := fault_of(answers, missing_first=False):
            raise ApiError(503, f"{who}; version {weights.version} serves everywhere else", code="replica_missing")
        outcomes = answers.values
        num_paused, gap_s = sum(one.num_paused for one in outcomes), max(one.gap_s for one in outcomes)
        return WeightOutcome(True, "the new weights serve", outcomes[0].weight_version, num_paused, gap_s)

    async def _discard(self, order_id: str) -> None:
        """Drop the staged weights on all replicas; a replica that does not answer drops them by itself."""
        await self.call("discard", order_id, timeout_s=DISCARD_S)

    @property
    def _staging_timeout_s(self) -> float:
        assert self.state.membership is not None, "a fleet stages"
        return self.state.membership.staging_timeout_s + STAGING_SLACK_S

    def _refused(self, fault: str) -> WeightOutcome:
        return WeightOutcome(False, f"{fault}: the old weights serve on", self.state.card.weight_version)


def values_of(answers: Answers) -> dict[str, Any]:
    """Return the values by replica.

    Raises: ApiError if a replica rejects the call, 503 if a replica does not answer.
    """
    if answers.missing:
        raise ApiError(503, _missing_sentence(answers.missing), code="replica_missing")
    if (refused := answers.refused) is not None and refused.refusal is not None:
        raise ApiError(refused.refusal.status, _sentence_of(refused), code=refused.refusal.code)
    return answers.values_by_replica


def fault_of(answers: Answers, *, missing_first: bool) -> str:
    """Return the reason why a replica has not done what all should do; empty if all have.

    A value that is a sentence, or an outcome without success, is a reason too.
    """
    missing = _missing_sentence(answers.missing) if answers.missing else ""
    if (refused := answers.refused) is not None and not (missing and missing_first):
        return _sentence_of(refused)
    if missing:
        return missing
    said = {
        name: ("" if one.value.success else one.value.message or "failed")
        if isinstance(one.value, WeightOutcome)
        else one.value
        for name, one in answers.by_replica.items()
    }
    return next((f"replica {name}: {reason}" for name, reason in said.items() if reason), "")


def _missing_sentence(missing: tuple[str, ...]) -> str:
    """Return a sentence with the replicas that did not answer."""
    return f"{'replicas' if len(missing) > 1 else 'replica'} {', '.join(missing)} did not answer"


def _sentence_of(answer: Answer) -> str:
    """Return a sentence with the replica that rejects and its reason."""
    return f"replica {answer.replica}: {answer.refusal.message if answer.refusal else answer.value}"


def _is_lone(member: FleetMember, view: FleetView | None) -> bool:
    """Return True if no other replica has joined; without a view, by this replica's own knowledge."""
    return member.is_single_replica if view is None else view.members <= {member.name}


async def _publish(membership: Membership, order_id: str, weights: ServedWeights) -> None:
    """Publish the weights that a single replica serves."""
    wanted = await _changed(membership, "commit", order_id, weights)
    membership.member.record(_next(membership.member, weights=weights) if wanted is None else wanted)


@asynccontextmanager
async def _ordered(membership: Membership) -> AsyncGenerator[tuple[str, FleetView | None]]:
    """Hold the fleet's lease on weight orders; yield its id and the fleet view.

    The view is None for a lone replica without the state actor.

    Raises: ApiError 503 if another order does not end in time.
    """
    order_id, deadline = uuid.uuid4().hex, time.monotonic() + CHANGE_S
    view = None
    while view is None:
        try:
            view = await membership.state.ask("begin", order_id)
        except StateUnavailableError as error:
            if membership.member.is_single_replica:
                break
            raise _unknown() from error
        if view is None and time.monotonic() > deadline:
            raise ApiError(503, "another update of the weights runs", code="update_running")
        await asyncio.sleep(0 if view else _POLL_S)
    renewing = asyncio.create_task(_renew(membership, order_id))
    try:
        yield order_id, view
    finally:
        renewing.cancel()
        with suppress(StateUnavailableError):
            await asyncio.shield(membership.state.ask("end", order_id))


async def _renew(membership: Membership, order_id: str) -> None:
    while True:
        await asyncio.sleep(LEASE_S / 5)
        with suppress(StateUnavailableError):
            await membership.state.ask("renew", order_id)


async def _changed(membership: Membership, method: str, *arguments: Any) -> Wanted | None:
    """Change the fleet state. Without the actor, a lone replica returns None and restores the state later."""
    try:
        return await membership.state.ask(method, *arguments)
    except StateUnavailableError as error:
        if membership.member.is_single_replica:
            return None
        raise _unknown() from error


def _next(member: FleetMember, **changes: Any) -> Wanted:
    return replace(member.applied, number=member.applied.number + 1, **changes)


def _unknown() -> ApiError:
    return ApiError(503, "the state of the fleet is unavailable: try again later", code="no_state")
