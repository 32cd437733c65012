"""Six ways through the package as docs/architecture.md states them, and an engine that goes them under a tracer."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.tracer import Tracer
from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.devices.lost_hosts import LosingExecutor
from tests.support.experts.eplb_proposals import EPLB_SETTINGS, SKEWED_CONFIG, SPREAD_SETTINGS
from tests.unit.engine.test_recovery import answers, recovering, varied

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
HEADING = "| walk | hops |"
REBALANCED_WITHIN_S = 600.0


def stated_walks(page: str) -> dict[str, list[str]]:
    """The hops of every walk, as the table of the page has them: a module, or a function of one."""
    rows = page.split(HEADING, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [row.strip("|").split("|") for row in rows]
    return {name.strip(): re.findall(r"`([^`]+)`", hops) for name, hops in cells}


def missing_or_late(hops: list[str], functions: list[str]) -> list[str]:
    """Hops that were not seen, or seen first before the hop in front of them was."""
    wrong, last = [], -1
    for hop in hops:
        seen = next((i for i, name in enumerate(functions) if name == hop or name.startswith(f"{hop}.")), None)
        if seen is None or seen <= last:
            wrong.append(hop)
        last = max(last, -1 if seen is None else seen)
    return wrong


def traced_walks(folder: Path) -> dict[str, list[str]]:
    """Return the functions of each walk in the order of their first calls."""
    path = write_checkpoint(folder / "model", SKEWED_CONFIG, seed=3, dtype="float32")
    tracer = Tracer()
    with tracer.installed():
        with tracer.recording() as start:
            engine = Engine(str(path), **SPREAD_SETTINGS, **EPLB_SETTINGS)
        with engine:
            api = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
            with tracer.recording() as request:
                _complete(api, return_routed_experts=True, max_tokens=4)
            with tracer.recording() as rebalance:
                _complete_until_rebalanced(api, engine)
        with recovering(LosingExecutor(frozenset([6]))) as loop, tracer.recording() as loss:
            answers(loop, varied())
    seen = {
        "prompt tokens": request,
        "a routing row": request,
        "an expert's weights": start,
        "a plan for experts": rebalance,
        "a lost host": loss,
        "a setting": start,
    }
    return {name: list(trace.functions) for name, trace in seen.items()}


def _complete_until_rebalanced(api: Any, engine: Engine) -> None:
    deadline = time.monotonic() + REBALANCED_WITHIN_S
    while not any(record.outcome == "finished" for record in engine.loop.eplb_control.view().history):
        assert time.monotonic() < deadline
        _complete(api, max_tokens=60, ignore_eos=True, n=8)


def _complete(api: Any, **fields: Any) -> None:
    asyncio.run(_post(api, {"model": "model", "prompt": list(range(7, 16)), "temperature": 0, **fields}))


async def _post(api: Any, body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here", timeout=600) as client:
        (await client.post("/v1/completions", json=body)).raise_for_status()
