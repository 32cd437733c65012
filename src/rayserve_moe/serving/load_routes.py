"""How busy the engine is: for clients that wait for it to be idle, and for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from rayserve_moe.engine.engine_loop import EngineLoop
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.balancing_metrics import BalancingMetrics
from rayserve_moe.serving.openapi import answers
from rayserve_moe.serving.streaming import json_answer

_COUNTERS = frozenset(
    {
        "preemptions",
        "steps",
        "tokens_computed",
        "tokens_sampled",
        "schedule_s",
        "pack_s",
        "transport_s",
        "device_s",
        "commit_s",
        "picks_rerouted",
        "picks_unfilled",
    }
)
_INCLUDE = {"parameters": [{"name": "include", "in": "query", "required": False, "schema": {"type": "string"}}]}


def load_router(state: ApiState) -> APIRouter:
    """Return the routes over one engine."""
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(EngineMetrics(state.loop))
    if state.balancing is not None:
        registry.register(BalancingMetrics(state.balancing))

    @router.get("/v1/loads", **answers(), openapi_extra=_INCLUDE)
    async def loads() -> Response:
        return json_answer(_loads(state.loop.statistics()))

    @router.get("/metrics", **answers(kinds=("text/plain",)))
    async def metrics() -> Response:
        text = await asyncio.get_running_loop().run_in_executor(state.encoding, generate_latest, registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


class EngineMetrics(Collector):
    """The engine's statistics as Prometheus metrics: totals since the start are counters, the rest gauges."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def describe(self) -> list[Metric]:
        """Registering asks for no numbers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every number as it is now."""
        for name, value in self._loop.statistics().items():
            family = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            spelled = f"{name[:-2]}_seconds" if name.endswith("_s") else name
            yield family(f"rayserve_moe_{spelled}", f"{name.replace('_', ' ')} of the engine", value=value)


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
