"""How busy the engine is: for clients that wait for it to be idle, and for Prometheus."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.balancing_metrics import BalancingMetrics
from rayserve_moe.serving.metrics import EngineMetrics
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.streaming import json_answer

_INCLUDE = {"parameters": [{"name": "include", "in": "query", "required": False, "schema": {"type": "string"}}]}


def load_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(EngineMetrics(state.loop, state.answered))
    if state.balancing is not None:
        registry.register(BalancingMetrics(state.balancing, model=state.card.name))

    @router.get("/v1/loads", **answers(), openapi_extra=_INCLUDE)
    async def loads() -> Response:
        return json_answer(_loads(state.loop.statistics()))

    @router.get("/metrics", **answers(kinds=("text/plain",)))
    async def metrics() -> Response:
        text = await asyncio.get_running_loop().run_in_executor(state.encoding, generate_latest, registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _loads(numbers: dict[str, float]) -> dict:
    """Return the core numbers, and once more in the list of data-parallel groups that routers expect."""
    pages_in_use = numbers["pages_total"] - numbers["pages_free"]
    core = {
        "num_running_reqs": int(numbers["requests_running"]),
        "num_waiting_reqs": int(numbers["requests_waiting"]),
        "num_used_tokens": int(numbers["tokens_in_use"]),
        "token_usage": pages_in_use / max(1.0, numbers["pages_total"]),
        "paused": bool(numbers["paused"]),
    }
    return {"timestamp": time.time(), **core, "dp_rank_count": 1, "loads": [{"dp_rank": 0, **core}]}
