"""Sent weights for all replicas: the receiver of a bucket forwards it, and the last bucket switches all replicas."""

from __future__ import annotations

import asyncio

from rayserve_moe.checkpoints.bucket import SentBucket, SentShares
from rayserve_moe.engine.control import WeightOutcome, following_version
from rayserve_moe.engine.updates.tensors import BucketOrder, UpdateConflictError
from rayserve_moe.fleet.broadcast import Answers
from rayserve_moe.fleet.wanted_state import ServedWeights
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet_control import (
    STAGING_SLACK_S,
    ask_all,
    decide,
    discard,
    is_lone,
    missing_sentence,
    note_own,
    ordered,
    sentence_of,
)

Sent = bytearray | dict[str, SentShares]
"""Bucket to forward: its body, or the shares cut by its sender, by replica."""


async def stage_everywhere(
    state: ApiState, bucket: SentBucket | SentShares, *, sent: Sent, order: BucketOrder
) -> WeightOutcome:
    """Stage a bucket on all replicas; after the last bucket all replicas switch to the sent weights, or none does.

    Raises: UpdateConflictError if a bucket does not follow the buckets of a replica; all replicas drop the update then.
    """
    fleet = state.fleet
    if fleet is None or (fleet.member.is_single_replica and not order.is_last):
        return await _own(state, bucket, order)
    if not order.is_last:
        return await _all_stage(state, sent, order)
    async with ordered(state, fleet) as (order_id, view):
        if is_lone(fleet, view):
            return await note_own(state, order_id, path=None, outcome=await _own(state, bucket, order))
        staged = await _all_stage(state, sent, order, order_id=order_id)
        if not staged.success:
            return staged
        version = order.order.weight_version or following_version(state.loop.control)
        weights = ServedWeights(order_id, None, version, order.order.aborts_requests)
        return await decide(state, order_id, weights=weights)


async def _own(state: ApiState, bucket: SentBucket | SentShares, order: BucketOrder) -> WeightOutcome:
    return await asyncio.wrap_future(state.loop.control.tensors.stage(bucket, order))


async def _all_stage(state: ApiState, sent: Sent, order: BucketOrder, *, order_id: str = "") -> WeightOutcome:
    """Forward a bucket to all replicas; if any does not stage it, all drop the update."""
    assert state.fleet is not None, "a fleet stages"
    update_id = order.update_id
    number = state.loop.control.tensors.num_staged(update_id) if order.number is None else order.number
    passed_on = sent if isinstance(sent, dict) else await asyncio.to_thread(state.fleet.calls.put, sent)
    limit_s = state.fleet.staging_timeout_s + STAGING_SLACK_S
    staged = await ask_all(state, "bucket", update_id, number, passed_on, order_id, timeout_s=limit_s)
    fault = _fault_of(staged)
    if fault:
        await discard(state, order_id)
        await ask_all(state, "drop_update", update_id)
        if staged.refused is not None and staged.refused.refusal is not None and staged.refused.refusal.status == 409:
            raise UpdateConflictError(fault)
        return WeightOutcome(False, f"{fault}: the old weights serve on", state.card.weight_version)
    return staged.values[0]


def _fault_of(answers: Answers) -> str:
    """Return the reason why a replica did not stage a bucket; empty if all did."""
    if (refused := answers.refused) is not None:
        return sentence_of(refused)
    if answers.missing:
        return missing_sentence(answers.missing)
    failed = (
        f"replica {name}: {one.value.message}" for name, one in answers.by_replica.items() if not one.value.success
    )
    return next(failed, "")
