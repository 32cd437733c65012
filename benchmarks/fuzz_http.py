"""Hostile requests to every route that takes a body: `python -m benchmarks.fuzz_http --count 100000`.

Bodies are good ones whose fields, drawn from the table of known ones and from nonsense, have been given values of every
kind; some are no JSON at all. Each answer must have a status that its route documents, and none is a 5xx but 501 and
503. At the end nothing runs, every page is free, and memory has hardly grown.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api.schemas.known_fields import PLACES, known_fields
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

MOST_GROWTH = 2048
"""Bytes a request by which memory may grow: bodies are longer."""
USER = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "completions": {"prompt": [5, 6], "max_tokens": 2},
    "chat": {"messages": USER, "max_tokens": 2},
    "native": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}},
    "tokens": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "messages": {"messages": USER, "max_tokens": 2},
    "count-tokens": {"messages": USER},
    "responses": {"input": "hi", "max_output_tokens": 2},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [5]},
    "abort": {"rid": "x"},
    "abort-ids": {"request_ids": ["x"]},
    "reset": {},
}
NESTED = {
    "native": ("native-sampling", "sampling_params"),
    "tokens": ("tokens-sampling", "sampling_params"),
    "completions": ("stream-options", "stream_options"),
}
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, 1.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 10**30),
    *("", "x", "none", "auto", "\x00", "é€\U0001f600", "a" * 300, "(a+)+$", "[", "../../etc/passwd", "{{ 7*7 }}"),
    *([], [1], [-1], [5, 6], ["x"], [None], [[5], [6]], [{}], [[]] * 3, ["a"] * 40, list(range(300))),
    *({}, {"x": 1}, {"5": 1}, {"type": "x"}, {"type": "text", "text": "x"}, {"type": "json_object"}),
    *(
        {"max_pattern_size": 2, "min_count": 2},
        {"include_usage": True},
        {"type": "function", "function": {"name": "f"}},
    ),
]
RAW = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 2000, b'{"a":' * 2000, b'{"n": NaN}', b'{"n": 1e999}']


def draw(generator: random.Random) -> tuple[str, bytes]:
    """Draw a path, and a body for it."""
    key = generator.choice(list(GOOD))
    path = generator.choice(PLACES[key][0])
    if generator.random() < 0.05:
        return path, generator.choice(RAW)
    body = dict(GOOD[key])
    _spoil(body, known_fields(key).names, generator)
    if key in NESTED and generator.random() < 0.6:
        nested, name = NESTED[key]
        inner = dict(body[name]) if isinstance(body.get(name), dict) else {}
        _spoil(inner, known_fields(nested).names, generator)
        body[name] = inner
    if generator.random() < 0.15:
        body["stream"] = True
    return path, json.dumps(body).encode()


def _spoil(body: dict[str, Any], names: list[str], generator: random.Random) -> None:
    for _ in range(generator.choice((0, 1, 1, 2, 3, 6))):
        name = generator.choice(names) if generator.random() < 0.95 else f"no_field_{generator.randrange(9)}"
        body[name] = generator.choice(VALUES)


async def ask(
    client: httpx.AsyncClient, count: int, generator: random.Random, *, documented: dict
) -> collections.Counter:
    """Send requests one after the other; returns how many had which status. AssertionError for a wrong one."""
    found: collections.Counter = collections.Counter()
    for _ in range(count):
        path, body = draw(generator)
        answer = await client.post(path, content=body)
        found[answer.status_code] += 1
        is_wrong = answer.status_code >= 500 and answer.status_code not in (501, 503)
        if is_wrong or str(answer.status_code) not in documented[path]:
            raise AssertionError(f"{path} {body[:600]!r} was answered {answer.status_code}: {answer.text[:300]}")
    return found


async def run(engine: Engine, count: int, *, seed: int, tasks: int) -> collections.Counter:
    """Send `count` requests, so many at a time, to the application of an engine."""
    app = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=600) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        documented = {path: set(methods["post"]["responses"]) for path, methods in paths.items() if "post" in methods}
        parts = [count // tasks + (place < count % tasks) for place in range(tasks)]
        each = [ask(client, n, random.Random(f"{seed} {i}"), documented=documented) for i, n in enumerate(parts)]
        return sum(await asyncio.gather(*each), collections.Counter())


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "tiny", PRESETS["tiny"], dtype="float32")
        settings = {"max_running_requests": 16, "max_step_tokens": 64, "max_model_len": 128, "num_pages": 200}
        with Engine(model_path=str(checkpoint), precompile_bs_paddings=[16], **settings) as engine:
            began = time.monotonic()
            first = options.count // 5  # what is allocated once is there by then
            found = asyncio.run(run(engine, first, seed=options.seed, tasks=options.tasks))
            warm, num_left = resident_bytes(), options.count - first
            found += asyncio.run(run(engine, num_left, seed=options.seed + 1, tasks=options.tasks))
            growth = (resident_bytes() - warm) / max(1, num_left)
            deadline = time.monotonic() + 60
            while not engine.loop.is_idle and time.monotonic() < deadline:
                time.sleep(0.05)
            engine.loop.check_integrity()
            numbers = engine.loop.statistics()
            assert numbers["requests_live"] == 0 and numbers["pages_free"] == numbers["pages_total"], numbers
    assert growth < MOST_GROWTH, f"{growth:.0f} bytes of memory more a request"
    statuses = ", ".join(f"{status}: {number}" for status, number in sorted(found.items()))
    seconds = time.monotonic() - began
    sys.stdout.write(
        f"{found.total()} requests in {seconds:.0f} s ({statuses}); nothing runs, and all pages are free; "
        f"{growth:.0f} bytes of memory more a request after the first fifth\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
