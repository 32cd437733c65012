"""Fleet calls that a replica answers, by name. All are idempotent, because a caller repeats unanswered calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from rayserve_moe.balancing.placement import PlacementConflictError, PlacementError
from rayserve_moe.balancing.placement_file import placement_as_json, placement_in
from rayserve_moe.checkpoints.bucket import Heads, SentAdapter, SentShares, WantedTensor, read_bucket
from rayserve_moe.cluster.replica_engine import FirstWeights
from rayserve_moe.engine.control import WeightOrder, WeightOutcome
from rayserve_moe.engine.prefill import compute_pages
from rayserve_moe.engine.pushed_pages import PromptRequest, Push, PushRefusedError
from rayserve_moe.engine.updates.adapters import AdapterLoads
from rayserve_moe.engine.updates.tensors import BucketOrder, UpdateConflictError
from rayserve_moe.fleet.broadcast import Answer, Refusal
from rayserve_moe.fleet.member import CannotFollowError
from rayserve_moe.fleet.wanted_state import Wanted
from rayserve_moe.requests.records import WeightsRefusedError
from rayserve_moe.serving.api.answers.tinker_orders import Held, held_evidence, held_future
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.membership import NO_ADAPTERS, Membership
from rayserve_moe.serving.errors import ApiError, as_api_error
from rayserve_moe.serving.metrics import metrics_of
from rayserve_moe.serving.response_store import StoredResponse

Calls = Mapping[str, Callable[..., Awaitable[Any]]]


async def answer(state: ApiState, call: str, *, arguments: tuple[Any, ...]) -> Answer:
    """Return this replica's answer to a fleet call."""
    return await answer_by(CALLS, state, call=call, arguments=arguments)


async def answer_by(calls: Calls, state: ApiState, *, call: str, arguments: tuple[Any, ...]) -> Answer:
    """Return the answer to a call in `calls` by name, or the refusal for its error."""
    name = _membership(state).member.name
    try:
        return Answer(name, await calls[call](state, *arguments))
    except (CannotFollowError, UpdateConflictError) as error:
        status = 409 if isinstance(error, UpdateConflictError) else 503
        return Answer(name, refusal=Refusal(status, str(error), "weights_conflict" if status == 409 else None))
    except (ApiError, ValueError, RuntimeError) as error:
        refused = as_api_error(error)
        return Answer(name, refusal=Refusal(refused.status, refused.message, refused.code))


async def _abort(state: ApiState, stem: str, is_prefix: bool) -> None:
    state.loop.check_health()
    state.loop.abort_stem(stem, is_prefix=is_prefix)


async def _abort_all(state: ApiState) -> int:
    state.loop.check_health()
    num_aborted = int(state.loop.statistics()["requests_live"])
    state.loop.abort_all()
    return num_aborted


async def _flush(state: ApiState, retracts: bool) -> bool:
    state.loop.check_health()
    return await asyncio.wrap_future(state.loop.control.flush(retracts=retracts))


async def _finish_session(state: ApiState, key: str) -> None:
    state.loop.check_health()
    await asyncio.wrap_future(state.loop.control.pages.finish_session(key))


async def _hold_new(state: ApiState, is_on: bool) -> None:
    control = state.loop.control
    await asyncio.wrap_future(control.hold_new() if is_on else control.resume())


async def _num_unended(state: ApiState) -> int:
    state.loop.check_health()
    return int(state.loop.statistics()["requests_live"]) - state.loop.control.num_held


async def _statistics(state: ApiState) -> dict[str, float]:
    return state.loop.statistics()


async def _weight_version(state: ApiState) -> str:
    return state.card.weight_version


async def _metrics(state: ApiState) -> list[Any]:
    return await asyncio.get_running_loop().run_in_executor(
        state.encoding, partial(metrics_of, state.loop, state.traffic.answered, journal=state.journal)
    )


async def _experts(state: ApiState, plan: int | None) -> dict[str, Any] | None:
    """Return loads and placements, now or at a plan; None if the plan's loads are not kept."""
    balancing = state.loop.eplb_control
    view = await asyncio.to_thread(balancing.view if plan is None else partial(balancing.view_of_plan, plan))
    return None if view is None else await asyncio.to_thread(view.as_json)


async def _placement(state: ApiState) -> dict[str, Any]:
    """Return the placement of experts as the content of a placement file."""
    placement = state.loop.eplb.migration.placement
    return await asyncio.to_thread(placement_as_json, placement, weight_version=state.card.weight_version)


async def _place_experts(state: ApiState, content: dict[str, Any]) -> int:
    """Have experts move to a placement; return the version that it gets."""
    eplb = state.loop.eplb
    if not eplb.moves_experts:
        raise ApiError(400, "experts stay where they are: start with enable_eplb: true", code="experts_stay")
    try:
        return eplb.order(await asyncio.to_thread(placement_in, content))
    except PlacementConflictError as error:
        raise ApiError(409, str(error), code="experts_moving") from error
    except PlacementError as error:
        raise ApiError(400, str(error), code="placement_refused") from error


async def _stage(state: ApiState, order_id: str, path: str) -> str:
    return await asyncio.to_thread(_membership(state).member.stage, state.loop.control, order_id, path=path)


async def _discard(state: ApiState, order_id: str) -> None:
    await asyncio.to_thread(_membership(state).member.discard, state.loop.control, order_id)


async def _follow(state: ApiState, wanted: Wanted) -> WeightOutcome:
    return await asyncio.to_thread(_membership(state).member.follow, state.loop.control, wanted)


async def _offered_weights(state: ApiState, order_id: str) -> FirstWeights | None:
    """Return the serving weights if they belong to this order."""
    membership = _membership(state)
    is_wanted = membership.member.applied.weights.order_id == order_id
    return await asyncio.to_thread(membership.offered_weights) if is_wanted else None


async def _wanted(
    state: ApiState, update_id: str, number: int, heads: Heads, base_version: str | None
) -> list[list[WantedTensor]]:
    order = BucketOrder(update_id, WeightOrder(""), number)
    try:
        return await asyncio.wrap_future(state.loop.control.tensors.wanted(heads, order, base_version=base_version))
    except WeightsRefusedError as refusal:
        raise ApiError(400, str(refusal), code="weights_refused") from refusal


async def _bucket(
    state: ApiState, update_id: str, number: int, sent: list[Any] | dict[str, SentShares], order_id: str
) -> WeightOutcome:
    """Stage a bucket of an update, or this replica's shares of it; the last bucket names its order and waits for it."""
    fleet = _membership(state)
    async with fleet.staging:
        if fleet.last_bucket is not None and fleet.last_bucket[:2] == (update_id, number):
            return fleet.last_bucket[2]
        if isinstance(sent, dict):
            bucket = shares_of(state, sent)
        else:
            bucket = await asyncio.to_thread(lambda: read_bucket(fleet.calls.get(sent)))
        order = BucketOrder(update_id, WeightOrder(""), number, is_last=bool(order_id), waits=bool(order_id))
        outcome = await asyncio.wrap_future(state.loop.control.tensors.stage(bucket, order))
        if outcome.success and order_id:
            fleet.member.record_sent(order_id, update_id)
        fleet.last_bucket = (update_id, number, outcome)
        return outcome


async def _load_adapter(state: ApiState, name: str, path: str, sent: list[Any]) -> WeightOutcome:
    content = await asyncio.to_thread(_membership(state).calls.get, sent)
    adapter = await asyncio.to_thread(read_bucket, content)
    assert isinstance(adapter, SentAdapter), "the receiver has checked it"
    return await asyncio.wrap_future(_loads(state).load(adapter, name, path=path))


async def _unload_adapter(state: ApiState, name: str) -> WeightOutcome:
    loads = _loads(state)
    if name not in loads.table.current:  # a repeated call
        return WeightOutcome(True, "the adapter is unloaded", state.card.weight_version)
    return await asyncio.wrap_future(loads.unload(name))


async def _offered_adapters(state: ApiState) -> list[tuple[str, str, list[Any]]]:
    """Return the adapters beside the weights, least recently used first: names, paths and references to bodies."""
    held, calls = _loads(state).table.named(), _membership(state).calls
    bodies = [await asyncio.to_thread(calls.put, bytearray(each.body)) for each in held]
    return [(each.name, each.path, body) for each, body in zip(held, bodies, strict=True)]


def _loads(state: ApiState) -> AdapterLoads:
    loads = state.loop.control.adapters
    if loads is None:
        raise ApiError(400, "this replica holds no adapters: start it with max_loras", code=NO_ADAPTERS)
    return loads


def shares_of(state: ApiState, sent: dict[str, SentShares]) -> SentShares:
    """Return this replica's shares of a bucket.

    Raises: UpdateConflictError if the replica joined after the bucket was cut.
    """
    if (shares := sent.get(_membership(state).member.name, sent.get(""))) is None:
        raise UpdateConflictError("the bucket was cut before this replica joined")
    return shares


async def _drop_update(state: ApiState, update_id: str) -> bool:
    if state.membership is not None:
        state.membership.last_bucket = None
    return await asyncio.wrap_future(state.loop.control.tensors.drop(update_id))


async def _knows_future(state: ApiState, request_id: str) -> bool:
    return state.futures.get(request_id) is not None


async def _tinker_future(state: ApiState, request_id: str, in_protobuf: bool, hold_s: float) -> Held | None:
    return await held_future(state, request_id, in_protobuf=in_protobuf, hold_s=hold_s)


async def _drop_future(state: ApiState, request_id: str) -> bool:
    return state.futures.drop(request_id)


async def _stored_response(state: ApiState, response_id: str) -> StoredResponse | None:
    return state.responses.get(response_id)


async def _prefill(state: ApiState, asked: PromptRequest) -> Push:
    """Compute a prompt for another replica."""
    try:
        return await asyncio.wrap_future(compute_pages(state.loop, asked))
    except PushRefusedError as refusal:
        raise ApiError(409, f"no pages are sent: {refusal}", code=str(refusal)) from refusal


async def _forget_response(state: ApiState, response_id: str) -> bool:
    return state.responses.drop(response_id)


def _membership(state: ApiState) -> Membership:
    assert state.membership is not None, "a fleet calls its members"
    return state.membership


CALLS: Calls = {
    "abort": _abort,
    "abort_all": _abort_all,
    "bucket": _bucket,
    "discard": _discard,
    "drop_update": _drop_update,
    "experts": _experts,
    "finish_session": _finish_session,
    "flush": _flush,
    "follow": _follow,
    "drop_future": _drop_future,
    "forget_response": _forget_response,
    "knows_future": _knows_future,
    "load_adapter": _load_adapter,
    "offered_adapters": _offered_adapters,
    "unload_adapter": _unload_adapter,
    "hold_new": _hold_new,
    "metrics": _metrics,
    "num_unended": _num_unended,
    "offered_weights": _offered_weights,
    "place_experts": _place_experts,
    "placement": _placement,
    "prefill": _prefill,
    "stage": _stage,
    "statistics": _statistics,
    "stored_response": _stored_response,
    "tinker_evidence": held_evidence,
    "tinker_future": _tinker_future,
    "wanted": _wanted,
    "weight_version": _weight_version,
}
