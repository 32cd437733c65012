"""What is served, and whether it is alive."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.responses import Response

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.streaming import json_answer


def control_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter()
    started = int(time.time())

    @router.get("/health")
    async def health() -> Response:
        state.loop.check_health()
        return json_answer({"status": "ok"})

    @router.get("/v1/models")
    async def models() -> Response:
        return json_answer({"object": "list", "data": [_model_object(state, started)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != state.card.name:
            raise ApiError(404, "no such model", param="model", code="model_not_found")
        return json_answer(_model_object(state, started))

    return router


def _model_object(state: ApiState, started: int) -> dict:
    card = state.card
    return {
        "id": card.name,
        "object": "model",
        "created": started,
        "owned_by": "rayserve_moe",
        "max_model_len": card.max_model_len,
        "weight_version": card.weight_version,
    }
