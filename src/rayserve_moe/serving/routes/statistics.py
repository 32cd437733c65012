"""Statistics: load for clients that wait for an idle engine, Prometheus metrics, and loads of experts with a page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rayserve_moe.fleet.broadcast import Answers
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.fleet_control import ask_all
from rayserve_moe.serving.metrics import Collected, merged
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.responses.streaming import json_answer, to_json

_INCLUDE = {"parameters": [{"name": "include", "in": "query", "required": False, "schema": {"type": "string"}}]}
_REPLICA = {"parameters": [{"name": "replica", "in": "query", "required": False, "schema": {"type": "string"}}]}
PAGE = Path(__file__).with_name("experts_page.html")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def statistics_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine. The page of experts holds no numbers: it requests them with the user's key."""
    router = APIRouter()
    page = PAGE.read_text(encoding="utf-8")

    @router.get("/v1/loads", **answers(), openapi_extra=_INCLUDE)
    async def loads() -> Response:
        answers = await ask_all(state, "statistics")
        return json_answer(loads_of(answers))

    @router.get("/load", **answers())
    async def load() -> Response:
        answers = await ask_all(state, "statistics")
        return json_answer({"server_load": sum(int(numbers["requests_live"]) for numbers in answers.values)})

    @router.get("/metrics", **answers(kinds=("text/plain",)))
    async def metrics() -> Response:
        answers = await ask_all(state, "metrics")
        text = await asyncio.get_running_loop().run_in_executor(state.encoding, _metrics, answers)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/experts", **answers(kinds=("text/html",)))
    async def experts() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})

    @router.get("/experts/state", **answers(404), openapi_extra=_REPLICA)
    async def experts_state(request: Request) -> Response:
        answers = await ask_all(state, "experts")
        names = list(answers.by_replica)
        chosen = request.query_params.get("replica", names[0])
        if chosen not in names or answers.by_replica[chosen].refusal is not None:
            raise ApiError(404, "no such replica answers", param="replica", code="replica_not_found")
        view = answers.by_replica[chosen].value
        text = await asyncio.to_thread(
            to_json, view if names == [""] else {**view, "replica": chosen, "replicas": names}
        )
        return Response(text, media_type="application/json")

    return router


def _metrics(answers: Answers) -> bytes:
    by_replica = answers.values_by_replica
    registry = CollectorRegistry()
    registry.register(Collected(by_replica[""] if "" in by_replica else merged(by_replica, answers.missing)))
    return generate_latest(registry)


def loads_of(answers: Answers) -> dict[str, Any]:
    """Return the numbers of all replicas, and of each in the list of data-parallel groups that routers expect.

    `missing` are replicas that have not answered, where there are several.
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
