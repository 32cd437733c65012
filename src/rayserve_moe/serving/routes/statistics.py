"""Statistics: load for clients that wait for an idle engine, Prometheus metrics, and loads of experts with a page."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import HTMLResponse, Response

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.metrics import BalancingMetrics, EngineMetrics
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.streaming import json_answer, to_json

_INCLUDE = {"parameters": [{"name": "include", "in": "query", "required": False, "schema": {"type": "string"}}]}
PAGE = Path(__file__).with_name("experts_page.html")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def statistics_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine. The page of experts holds no numbers: it requests them with the user's key."""
    router = APIRouter()
    page = PAGE.read_text(encoding="utf-8")

    @router.get("/v1/loads", **answers(), openapi_extra=_INCLUDE)
    async def loads() -> Response:
        return json_answer(_loads(state.loop.statistics()))

    @router.get("/load", **answers())
    async def load() -> Response:
        return json_answer({"server_load": int(state.loop.statistics()["requests_live"])})

    @router.get("/metrics", **answers(kinds=("text/plain",)))
    async def metrics() -> Response:
        text = await asyncio.get_running_loop().run_in_executor(state.encoding, _metrics, state)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/experts", **answers(kinds=("text/html",)))
    async def experts() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    @router.get("/experts/state", **answers())
    async def experts_state() -> Response:
        balancing = state.loop.eplb_control
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(state.encoding, lambda: to_json(balancing.view().as_json()))
        return Response(text, media_type="application/json")

    return router


def _metrics(state: ApiState) -> bytes:
    registry = CollectorRegistry()
    registry.register(EngineMetrics(state.loop, state.traffic.answered))
    if state.loop.eplb.moves_experts:
        registry.register(BalancingMetrics(state.loop.eplb_control, model=state.card.name))
    return generate_latest(registry)


def _loads(numbers: dict[str, float]) -> dict:
    """Return the numbers, repeated in the list of data-parallel groups that routers expect."""
    pages_in_use = numbers["pages_total"] - numbers["pages_free"]
    core = {
        "num_running_reqs": int(numbers["requests_running"]),
        "num_waiting_reqs": int(numbers["requests_waiting"]),
        "num_used_tokens": int(numbers["tokens_in_use"]),
        "token_usage": pages_in_use / max(1.0, numbers["pages_total"]),
        "paused": bool(numbers["paused"]),
    }
    return {"timestamp": time.time(), **core, "dp_rank_count": 1, "loads": [{"dp_rank": 0, **core}]}
