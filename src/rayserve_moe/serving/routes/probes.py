"""Probes of load balancers and trainers, under the names that they have elsewhere."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from rayserve_moe.engine.recovery.hosts import progress_of
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.streaming import json_answer


def probe_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
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
