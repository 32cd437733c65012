"""Health, and probes of load balancers and trainers."""

from __future__ import annotations

import asyncio
import uuid

import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from rayserve_moe.engine.recovery.hosts import progress_of
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.request_streams import open_streams
from rayserve_moe.serving.responses.streaming import json_answer

MAX_PROBE_S = 20.0


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
