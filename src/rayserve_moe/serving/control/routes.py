"""Health, probes of load balancers and trainers, abort, pause, weight updates, and cache flush."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.engine.control import WeightOrder, WeightOutcome
from rayserve_moe.engine.recovery.hosts import progress_of
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.serving.api.answers.request_streams import open_streams
from rayserve_moe.serving.api.answers.streaming import json_answer
from rayserve_moe.serving.api.schemas.control import AbortBody, PauseBody, ResetOptions, UpdateWeightsBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet_control import ask_every, pause_all, update_all
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.edge_guard import has_admin_key, refused_key
from rayserve_moe.serving.middleware.json_body import read_body, read_options
from rayserve_moe.serving.openapi import COMMAND, answers, takes

MAX_PROBE_S = 20.0


def control_router(state: ApiState) -> APIRouter:
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

    @router.post("/abort_request", **takes(AbortBody, *COMMAND))
    async def abort_request(request: Request) -> Response:
        body = await read_body(request, AbortBody, admission=state.admission)
        state.loop.check_health()
        if body.abort_all or body.prefix:
            check_admin(state, request)
        if body.abort_all:
            await ask_every(state, "abort_all")
        else:
            await ask_every(state, "abort", body.rid, body.prefix)
        return json_answer({"success": True})

    _add_weight_routes(router, state)
    for path, methods in (("/flush_cache", ("GET", "POST")), ("/reset_prefix_cache", ("POST",))):
        for method in methods:
            described = answers(*COMMAND) if method == "GET" else takes(ResetOptions, *COMMAND)
            router.add_api_route(path, _flush_route(state), methods=[method], **described)
    return router


def check_admin(state: ApiState, request: Request) -> None:
    """Raise ApiError 401 for a request without the key for changes that affect all clients."""
    if not has_admin_key(state.server, request.headers.get("authorization", "")):
        raise refused_key()


def _add_weight_routes(router: APIRouter, state: ApiState) -> None:
    """Add the routes that trainers call between batches of rollouts."""

    @router.post("/pause_generation", **takes(PauseBody, *COMMAND))
    async def pause_generation(request: Request) -> Response:
        body = await read_body(request, PauseBody, admission=state.admission)
        await pause_all(state, body.mode)
        return json_answer({"success": True, "status": "ok", "message": "generation is paused"})

    @router.post("/continue_generation", **answers(413, 503))
    async def continue_generation() -> Response:
        await pause_all(state, None)
        return json_answer({"success": True, "status": "ok", "message": "generation goes on"})

    @router.post("/update_weights_from_disk", **takes(UpdateWeightsBody, *COMMAND))
    async def update_weights_from_disk(request: Request) -> Response:
        body = await read_body(request, UpdateWeightsBody, admission=state.admission)
        order = WeightOrder(body.model_path, body.weight_version or None, aborts_requests=body.abort_all_requests)
        return await update_answer(state, order)


async def update_answer(state: ApiState, order: WeightOrder, *, param: str = "model_path") -> Response:
    """Update the weights. A refusal has an error object beside SGLang's fields; `param` is the field of the path."""
    return outcome_answer(await update_all(state, order), param=param)


def outcome_answer(outcome: WeightOutcome, *, param: str | None = None) -> Response:
    """Return the answer to an update; a refusal has status 400."""
    fields = {"success": outcome.success, "message": outcome.message, "num_paused_requests": outcome.num_paused}
    if outcome.success:
        return json_answer({**fields, "weight_version": outcome.weight_version})
    error = ApiError(400, outcome.message, param=param, code="weights_refused")
    return json_answer({**error.body(), **fields}, status=error.status)


def _flush_route(state: ApiState) -> Callable[[Request], Awaitable[Response]]:
    async def flush_cache(request: Request) -> Response:
        options = await read_options(request, ResetOptions, admission=state.admission)
        state.loop.check_health()
        if not all(await ask_every(state, "flush", options.reset_running_requests)):
            raise ApiError(400, "requests are running: wait for them, or abort them first", code="requests_running")
        return json_answer({"success": True, "message": "the cache is flushed"})

    return flush_cache


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


def probe_router(state: ApiState) -> APIRouter:
    """Return the routes over an engine."""
    router = APIRouter()

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
