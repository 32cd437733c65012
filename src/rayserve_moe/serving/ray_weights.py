"""Weights from trainers in the same Ray cluster: every host fetches the object that was cut for it.

The replica that is asked passes references on and holds no values. Who can call actors of the cluster may run code in
them anyway, so nothing is lost by what a call of an actor unpickles.
"""

from __future__ import annotations

from typing import Any

from rayserve_moe.checkpoints.bucket import Heads, SentShares, WantedTensor
from rayserve_moe.engine.control import WeightOrder, WeightOutcome
from rayserve_moe.engine.updates.tensors import BucketOrder
from rayserve_moe.fleet.broadcast import Answer
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.fleet_buckets import stage_everywhere
from rayserve_moe.serving.fleet_control import ask_all, ask_every, values_of
from rayserve_moe.serving.replica_calls import answer_by, shares_of


async def answer_trainer(state: ApiState, call: str, *, arguments: tuple[Any, ...]) -> Answer:
    """Return the answer to a call of a trainer, which concerns all replicas."""
    return await answer_by(CALLS, state, call=call, arguments=arguments)


async def _held(state: ApiState) -> dict[str, Any]:
    """What weights are rounded to, and the version that serves."""
    report = state.loop.start_report
    return {
        "dtype": report.dtype,
        "float32_tensors": report.float32_tensors,
        "weight_version": state.card.weight_version,
    }


async def _wanted(
    state: ApiState, update_id: str, number: int, heads: Heads, base_version: str | None
) -> dict[str, list[list[WantedTensor]]]:
    """By replica what each of its hosts wants of the tensors of a bucket; a lone one may have no name."""
    assert state.fleet is not None, "a replica of Serve has a fleet"
    limit_s = state.fleet.staging_timeout_s
    answers = await ask_all(state, "wanted", update_id, number, heads, base_version, timeout_s=limit_s)
    return values_of(answers)


async def _stage(
    state: ApiState, update_id: str, number: int, sent: dict[str, SentShares], order: WeightOrder | None
) -> WeightOutcome:
    """Have all replicas stage their shares of a bucket; with an `order`, which comes with the last one, they serve."""
    bucket_order = BucketOrder(update_id, order or WeightOrder(""), number, is_last=order is not None)
    return await stage_everywhere(state, shares_of(state, sent), sent=sent, order=bucket_order)


async def _drop(state: ApiState, update_id: str) -> None:
    await ask_every(state, "drop_update", update_id)


CALLS = {"drop": _drop, "held": _held, "stage": _stage, "wanted": _wanted}
