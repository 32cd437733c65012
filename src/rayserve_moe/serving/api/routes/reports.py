"""Reports: health, model and weights, statistics and metrics, expert loads, and request fields."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.engine.recovery.hosts import progress_of
from rayserve_moe.fleet.broadcast import Answers
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.serving.api.answers.request_streams import open_streams
from rayserve_moe.serving.api.answers.streaming import json_answer, to_json
from rayserve_moe.serving.api.routes.request_parts import adapter_names
from rayserve_moe.serving.api.schemas.control import PlacementBody
from rayserve_moe.serving.api.schemas.known_fields import NOTHING, PLACES, KnownFields, known_fields, plain_objects
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.metrics import Collected, merged, package_version
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import COMMAND, answers, takes

MAX_PROBE_S = 20.0
_NAME_IN_PATH = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}
_INCLUDE = {"parameters": [{"name": "include", "in": "query", "required": False, "schema": {"type": "string"}}]}
_LOADS = {
    "parameters": [
        {"name": "replica", "in": "query", "required": False, "schema": {"type": "string"}},
        {"name": "plan", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 0}},
    ]
}


def model_router(state: ApiState) -> APIRouter:
    """Return the routes of the model and its weights."""
    router = APIRouter()

    @router.get("/v1/models", **answers())
    async def models() -> Response:
        return json_answer({"object": "list", "data": [_model_object(state), *_adapter_objects(state)]})

    @router.get("/v1/models/{name:path}", **answers(404), openapi_extra=_NAME_IN_PATH)
    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for served in (_model_object(state), *_adapter_objects(state)):
            if served["id"] == name:
                return json_answer(served)
        raise ApiError(404, "no such model", param="model", code="model_not_found")

    @router.get("/model_info", **answers())
    @router.get("/get_model_info", **answers())
    async def model_info() -> Response:
        return json_answer(_model_description(state))

    @router.get("/server_info", **answers())
    @router.get("/get_server_info", **answers())
    async def server_info() -> Response:
        answers = await Fleet(state).report("statistics")
        kernels = dict(state.loop.start_report.kernels)
        about = {**_model_description(state), "version": package_version(), "kernels": kernels}
        if (alone := answers.by_replica.get("")) is not None:
            return json_answer({**about, "statistics": alone.value})
        prefill = sorted(state.membership.member.view.prefill) if state.membership else []
        roles = {"prefill": prefill} if prefill else {}
        return json_answer({**about, **_fleet_fields(answers), **roles})

    _add_versions(router, state)
    return router


def _add_versions(router: APIRouter, state: ApiState) -> None:
    """Add routes that answer a single value."""

    @router.get("/weight_info", **answers())
    @router.get("/get_weight_version", **answers())
    async def get_weight_version() -> Response:
        answers = await Fleet(state).report("weight_version")
        if "" in answers.by_replica:
            return json_answer({"weight_version": state.card.weight_version})
        agree = not answers.missing and len(set(answers.values)) == 1
        return json_answer({"weight_version": state.card.weight_version, **_fleet_fields(answers), "agree": agree})

    @router.get("/version", **answers())
    async def version() -> Response:
        return json_answer({"version": package_version()})

    @router.get("/get_world_size", **answers(400))
    async def get_world_size(request: Request) -> Response:
        if request.query_params.get("include_dp", "true").lower() not in ("true", "1"):
            raise ApiError(400, "`include_dp` is not supported: leave it out", param="include_dp")
        return json_answer({"world_size": state.loop.start_report.num_expert_ranks})


def _fleet_fields(answers: Answers) -> dict:
    """Return the answers by replica, the replicas without one, and how many Serve keeps up if it knows."""
    wanted = {} if answers.num_wanted is None else {"num_wanted_replicas": answers.num_wanted}
    return {"replicas": answers.values_by_replica, "missing": list(answers.missing), **wanted}


def _model_object(state: ApiState) -> dict:
    card = state.card
    return {
        "id": card.name,
        "object": "model",
        "created": int(state.started_at),
        "owned_by": "rayserve_moe",
        "max_model_len": card.max_model_len,
        "weight_version": card.weight_version,
    }


def _adapter_objects(state: ApiState) -> list[dict]:
    """Return the adapters as vLLM lists them, except for one under the model's own name."""
    served, control = _model_object(state), state.loop.control
    keys = {} if control.adapters is None else control.adapters.table.current
    return [
        {**served, "id": name, "parent": served["id"]} | ({"adapter": keys[name]} if name in keys else {})
        for name in adapter_names(state)
        if name != served["id"]
    ]


def _model_description(state: ApiState) -> dict:
    card = state.card
    return {
        "model_path": card.path,
        "tokenizer_path": str(state.tokenizer.directory),
        "served_model_name": card.name,
        "is_generation": True,
        "weight_version": card.weight_version,
        "adapter": state.loop.control.adapter or None,
        "max_model_len": card.max_model_len,
        "vocab_size": card.vocab_size,
        "enable_return_routed_experts": card.returns_routing,
        "enable_return_indexer_topk": card.index is not None,
        "enable_return_router_gates": card.gates is not None,
        "enable_audit": card.evidence.audits,
        "hidden_state_layers": list(card.evidence.state_layers),
        "num_hidden_layers": card.routing.num_hidden_layers,
        "moe_layer_ids": list(card.routing.layer_ids),
        "num_experts": card.routing.num_experts,
        "num_experts_per_tok": card.routing.top_k,
        "dtype": state.loop.start_report.dtype,
        "float32_tensors": list(state.loop.start_report.float32_tensors),
    }


def fields_router() -> APIRouter:
    """Return the route `/v1/fields`, for programs."""
    router = APIRouter()
    told = {"version": package_version(), "switched_off_by": list(NOTHING), "objects": list(_objects())}

    @router.get("/v1/fields", **answers())
    async def fields() -> Response:
        return json_answer(told)

    return router


def _objects() -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of requests: their routes and location, and their fields by name."""
    for key, (routes, place) in PLACES.items():
        yield {"routes": list(routes), "object": place, "fields": _fields(known_fields(key))}
        for name, known in plain_objects(key).items():
            yield {"routes": list(routes), "object": name, "fields": _fields(known)}


def _fields(known: KnownFields) -> dict[str, dict[str, Any]]:
    return {
        **{name: {"standing": "computed"} for name in sorted(known.computed)},
        **{name: {"standing": "computed", "same_as": own} for name, own in sorted(known.other_names.items())},
        **{name: {"standing": "accepted"} for name in sorted(known.accepted)},
        **{
            name: {"standing": "refused", "also_switched_off_by": list(values)}
            for name, values in sorted(known.refused.items())
        },
    }


def statistics_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()

    @router.get("/v1/loads", **answers(), openapi_extra=_INCLUDE)
    async def loads() -> Response:
        answers = await Fleet(state).call("statistics")
        return json_answer(loads_of(answers))

    @router.get("/load", **answers())
    async def load() -> Response:
        answers = await Fleet(state).call("statistics")
        return json_answer({"server_load": sum(int(numbers["requests_live"]) for numbers in answers.values)})

    @router.get("/metrics", **answers(kinds=("text/plain",)))
    async def metrics() -> Response:
        answers = await Fleet(state).call("metrics")
        text = await asyncio.get_running_loop().run_in_executor(state.encoding, _metrics, answers)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/experts/state", **answers(400, 404), openapi_extra=_LOADS)
    async def experts_state(request: Request) -> Response:
        plan = request.query_params.get("plan", "")
        if not (plan.isascii() and plan.isdigit() and len(plan) < 10) and plan:
            raise ApiError(400, "`plan` should be the version of a plan", param="plan")
        answers = await Fleet(state).call("experts", int(plan) if plan else None)
        names = list(answers.by_replica)
        chosen = request.query_params.get("replica", names[0])
        if chosen not in names or answers.by_replica[chosen].refusal is not None:
            raise ApiError(404, "no such replica answers", param="replica", code="replica_not_found")
        view = answers.by_replica[chosen].value
        if view is None:
            raise ApiError(404, "the loads of this plan are not kept", param="plan", code="plan_not_found")
        text = await asyncio.to_thread(
            to_json, view if names == [""] else {**view, "replica": chosen, "replicas": names}
        )
        return Response(text, media_type="application/json")

    @router.get("/experts/placement", **answers(503))
    async def expert_placement() -> Response:
        return json_answer((await Fleet(state).every("placement"))[0])

    @router.post("/experts/placement", **takes(PlacementBody, 409, *COMMAND))
    async def place_experts(request: Request) -> Response:
        body = await read_body(request, PlacementBody, admission=state.admission)
        versions = await Fleet(state).every("place_experts", body.model_dump())
        return json_answer({"success": True, "message": "experts move with the next steps", "version": max(versions)})

    return router


def _metrics(answers: Answers) -> bytes:
    by_replica = answers.values_by_replica
    registry = CollectorRegistry()
    registry.register(Collected(by_replica[""] if "" in by_replica else merged(by_replica, answers.missing)))
    return generate_latest(registry)


def loads_of(answers: Answers) -> dict[str, Any]:
    """Return the totals over all replicas, and each replica's numbers.

    The latter are the list of data-parallel groups that routers expect. With several replicas, `missing` are those that
    have not answered.
    """
    by_replica = {name: _load_of(value) for name, value in answers.values_by_replica.items()}
    each = [
        {"dp_rank": rank, **({"replica": name} if name else {}), **load}
        for rank, (name, load) in enumerate(by_replica.items())
    ]
    loads = list(by_replica.values())
    counts = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    core = {
        **{name: sum(load[name] for load in loads) for name in counts},
        "token_usage": sum(load["token_usage"] for load in loads) / max(1, len(loads)),
        "paused": all(load["paused"] for load in loads),
    }
    missing = {} if "" in by_replica else {"missing": list(answers.missing)}
    return {"timestamp": time.time(), **core, "dp_rank_count": len(each), "loads": each, **missing}


def _load_of(numbers: Mapping[str, float]) -> dict[str, Any]:
    pages_in_use = numbers["pages_total"] - numbers["pages_free"]
    return {
        "num_running_reqs": int(numbers["requests_running"]),
        "num_waiting_reqs": int(numbers["requests_waiting"]),
        "num_used_tokens": int(numbers["tokens_in_use"]),
        "token_usage": pages_in_use / max(1.0, numbers["pages_total"]),
        "paused": bool(numbers["paused"]),
    }


def probe_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()

    @router.get("/health", **answers(503))
    async def health() -> Response:
        state.loop.check_health()
        await state.traffic.refuse_when_draining()
        if (progress := progress_of(state.loop.recovery)) is not None:
            return json_answer({"status": "rebuilding", "phase": progress.phase, "seconds": round(progress.seconds, 2)})
        num_missing = 0 if state.loop.recovery is None else state.loop.recovery.layout.num_missing_hosts
        missing = {"hosts_missing": num_missing} if num_missing else {}
        lost = {} if state.journal is None or state.journal.is_up else {"journal": "down"}
        awaited = {"weights_awaited": state.awaited_weights} if state.awaited_weights else {}
        return json_answer({"status": "ok", **missing, **lost, **awaited})

    @router.get("/health_generate", **answers(429, 503))
    async def health_generate() -> Response:
        state.loop.check_health()
        await state.refuse_without_weights()
        if not state.loop.control.is_paused:
            await _generate_one_token(state)
        return json_answer({"status": "ok"})

    @router.get("/liveness", **answers(503))
    @router.get("/ping", **answers(503))
    @router.post("/ping", **answers(503))
    async def ping() -> Response:
        state.loop.check_health()
        return json_answer({"status": "ok"})

    @router.get("/ready", **answers(503))
    async def ready() -> Response:
        state.loop.check_health()
        await state.traffic.refuse_when_draining()
        if (progress := progress_of(state.loop.recovery)) is not None:
            raise ApiError(503, f"hosts are being replaced: {progress.phase}", code="rebuilding")
        await state.refuse_without_weights()
        if state.loop.control.is_paused:
            raise ApiError(503, "generation is paused", code="paused")
        return json_answer({"status": "ok"})

    return router


async def _generate_one_token(state: ApiState) -> None:
    """Generate a token.

    Raises: ApiError 503 unless it arrives in time.
    """
    request = GenerationRequest(
        request_id=f"health-{uuid.uuid4().hex}",
        prompt_ids=np.zeros(1, np.int32),
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        incremental=False,
    )
    streams = await open_streams(state, [request])
    try:
        (result,) = await asyncio.wait_for(streams.results(), MAX_PROBE_S)
    except (TimeoutError, ApiError) as error:
        raise ApiError(503, "the engine generates nothing", code="nothing_generated") from error
    finally:
        streams.close()
    if not result.token_ids:
        raise ApiError(503, "the engine generates nothing", code="nothing_generated")
