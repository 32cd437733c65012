"""Schemas that cost more than they are worth: how long they hold up the stream of another request.

    python -m benchmarks.hostile_schemas [--model calculator] [--repeats 5] [--out FILE.json]

One unconstrained stream runs in the application's own event loop; each schema is sent beside it, asks for 64 tokens,
and is answered or refused. The gaps are those between events of the stream meanwhile; without a schema, over SECONDS.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.structured import SETTINGS, TEXTS, model_of
from benchmarks.table import tables
from rayserve_moe import Engine
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.cluster.startup_memory import freeze_what_stays
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

SECONDS = 1.0
MAX_MODEL_LEN = 4096
MAX_TOKENS, WARM_EVENTS = 64, 10


def nested(depth: int) -> dict[str, Any]:
    """Return lists within lists."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def with_optional(count: int) -> dict[str, Any]:
    """Return the schema of an object with `count` optional properties."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


SCHEMAS: dict[str, Any] = {
    "an enum of 100,000 texts": {"enum": [f"value {i}" for i in range(100_000)]},
    "an enum of 4,000 texts": {"enum": [f"value {i}" for i in range(4_000)]},
    "2,000 patterns": {"anyOf": [{"type": "string", "pattern": f"^a{i}[a-z]*$"} for i in range(2_000)]},
    "(.*a){25}": {"type": "string", "pattern": "^(.*a){25}$"},
    "30 patterns at once": {
        "allOf": [{"type": "string", "pattern": f"^(.*{c}){{9}}"} for c in "abcdefghijklmnopqrstuvwxyzABCD"]
    },
    "300 levels": nested(300),
    "60 levels": nested(60),
    "maxLength 10,000,000": {"type": "string", "maxLength": 10_000_000},
    "1,000 optional properties": with_optional(1_000),
    "2,000 optional properties": with_optional(2_000),
    '{"$ref": "#"}': {"$ref": "#"},
}


async def run(engine: Engine, *, repeats: int) -> dict[str, Any]:
    """Run every schema several times, by turns."""
    app = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
    freeze_what_stays()  # as a replica does: a full collection holds all threads for 0.2 s
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    found: dict[str, Any] = {name: {"outcome": "", "answered_ms": 0.0, "gaps_ms": []} for name in SCHEMAS}
    quiet = []
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=600) as client:
        await _gap(engine, asyncio.sleep(SECONDS))
        for _ in range(repeats):
            quiet.append((await _gap(engine, asyncio.sleep(SECONDS)))[0])
            for name, each in found.items():
                # A constraint that has been compiled is kept: no two are alike.
                schema = SCHEMAS[name] | {"title": uuid.uuid4().hex}
                body = {"prompt": [5, 6], "max_tokens": MAX_TOKENS, "structured_outputs": {"json": json.dumps(schema)}}
                started = time.perf_counter()
                gap, answer = await _gap(engine, client.post("/v1/completions", content=json.dumps(body).encode()))
                each["answered_ms"] = max(each["answered_ms"], 1e3 * (time.perf_counter() - started))
                each["gaps_ms"].append(gap)
                each["outcome"] = _outcome(answer)
            note(", ".join(f"{each['gaps_ms'][-1]:.0f} ms" for each in found.values()))
    return {"quiet_gaps_ms": quiet, "schemas": found}


def _outcome(answer: httpx.Response) -> str:
    if answer.status_code == 200:
        return f"200, {answer.json()['choices'][0]['finish_reason']}"
    return f"{answer.status_code}: {answer.json()['error']['message']}"


async def _gap(engine: Engine, meanwhile: Any) -> tuple[float, Any]:
    """Return the longest gap in ms between events of a stream during another request, and that request's outcome."""
    arrivals: list[float] = []
    is_running = asyncio.Event()

    async def read() -> None:
        """Read one stream after the other."""
        sampling = SamplingParams(max_new_tokens=MAX_MODEL_LEN - 8, ignore_eos=True, seed=0)
        while True:
            request = GenerationRequest(uuid.uuid4().hex, np.asarray([5, 6], np.int32), sampling)
            stream = GenerationStream(engine.loop, engine.tokenizer, request=request)
            try:
                async for _ in stream:
                    arrivals.append(time.perf_counter())
                    if len(arrivals) == WARM_EVENTS:
                        is_running.set()
            finally:
                stream.close()

    reading = asyncio.create_task(read())
    await is_running.wait()
    begun = len(arrivals) - 1
    result = await meanwhile
    arrivals.append(time.perf_counter())
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return 1e3 * max(later - earlier for earlier, later in itertools.pairwise(arrivals[begun:])), result


def main() -> None:
    """Measure one model, print the table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=TEXTS, default="calculator")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "hostile_schemas.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    with Engine(model_of(arguments.model), **SETTINGS | {"max_model_len": MAX_MODEL_LEN}) as engine:
        found = asyncio.run(run(engine, repeats=arguments.repeats))
    result = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    found |= {"model": TEXTS[arguments.model], "facts": machine_facts(load_before)}
    result["hostile_schemas"] = result.get("hostile_schemas", {}) | {arguments.model: found}
    save(result, arguments.out)
    print(tables({"hostile_schemas": {arguments.model: found}}))


if __name__ == "__main__":
    main()
