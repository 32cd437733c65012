"""Answers of every HTTP route to some 2,400 bodies, recorded before a change and compared after it.

    python -m benchmarks.recorded_bodies run BEFORE                   draw bodies, and record their answers
    python -m benchmarks.recorded_bodies run AFTER --like BEFORE      record the answers to the bodies of BEFORE
    python -m benchmarks.recorded_bodies compare BEFORE AFTER         exit status 1 if an answer differs

Run each command in the work tree that it is about, on the same processor. Two applications answer in this process, one
body at a time and without cached prefixes: a small random model, and one whose chats reason and call tools. Bodies are
good ones, with fields drawn from `GET /v1/fields`, values from `recorded_values`, unknown names and text that is no
JSON. Outputs are greedy or seeded. Ids and times are left out of the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import json
import random
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.recorded_values import FIXED, FIXED_CHATS, GOOD, GOOD_CHATS, NAMED, RAW, VALUES
from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import PRESETS, write_checkpoint
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine import output_dispatch
from rayserve_moe.replay.encoding import decode_rollout
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

SERVED: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "enable_return_hidden_states": True,
    "max_running_requests": 8,
    "max_step_tokens": 64,
    "precompile_bs_paddings": [8],
    "max_model_len": 512,
    "num_pages": 128,
}
NUM_DRAWN = {"plain": 1700, "chats": 500}
"""Bodies drawn for each application, besides fixed ones."""
MAX_TRIES = 8
"""Times that a body is sent until its answer repeats: a busy machine may join events of a stream."""
TURNS_PER_STEP = 40
"""Turns of the event loop between two steps: events of a step leave before the next one."""
CONTROL = ("/pause", "/update_weight", "/abort", "/continue", "/areal", "/resume")
HEADERS = ("content-type", "x-ignored-fields", "retry-after", "www-authenticate")
_VOLATILE = re.compile(r'"(created|created_at|completed_at|e2e_latency|started_at)":[0-9.e+-]+')
_IDS = re.compile(r"(?<![0-9a-f])[0-9a-f]{24,48}(?![0-9a-f])")
_MAX_TOLD = 2000


class Sent(NamedTuple):
    """Request to an application; `{checkpoint}` in its body is the path of the model."""

    app: str
    method: str
    path: str
    body: bytes = b""
    accept: str = ""


def draw(generator: random.Random, names: Mapping[str, list[str]], app: str) -> Sent:
    """Draw a request: a good body of a route, usually with other fields."""
    good = GOOD if app == "plain" else GOOD_CHATS
    path = generator.choice([path for path in good for _ in range(8 if "sampling" in str(good[path]) else 4)])
    if generator.random() < 0.03:
        return Sent(app, "POST", path, generator.choice(RAW))
    body: dict[str, Any] = dict(generator.choice(good[path]))
    sane = generator.random() < 0.7
    _vary(body, names[f"{path} body"], generator, sane=sane)
    for name in ("sampling_params", "stream_options"):
        inner = body.get(name, {} if name == "stream_options" and body.get("stream") is True else None)
        if f"{path} {name}" in names and isinstance(inner, dict) and generator.random() < 0.6:
            body[name] = dict(inner)
            _vary(body[name], names[f"{path} {name}"], generator, sane=sane)
    is_streamed = "stream" in names[f"{path} body"] and generator.random() < 0.25
    _make_repeatable(path, body)
    accept = ""
    if "/generate" in path and not is_streamed and generator.random() < 0.1:
        accept = f"application/x-rollout+octet-stream{generator.choice(('', '+zstd'))}"
    return Sent(app, "POST", path, json.dumps(body | ({"stream": True} if is_streamed else {})).encode(), accept)


def _vary(body: dict[str, Any], names: list[str], generator: random.Random, *, sane: bool) -> None:
    for _ in range(generator.choice((0, 1, 1, 2, 3, 5))):
        if generator.random() < 0.04:
            body[generator.choice(("sparkle", "no_such_field", "é,\n", "temperatur", "streams", "max_tokenz"))] = 1
        else:
            name = generator.choice([name for name in names if name in NAMED] or names if sane else names)
            body[name] = generator.choice(NAMED[name] if sane and name in NAMED else VALUES)


def _make_repeatable(path: str, body: dict[str, Any]) -> None:
    """Have the answer not depend on drawn seeds; invalid values stay."""
    inner = body.get("sampling_params") if "/generate" in path else body
    if path.startswith("/v1/messages"):
        if body.get("top_k") in (None, 0, -1):
            body["top_k"] = 1
        return
    for params in inner if isinstance(inner, list) else [inner]:
        seed = "sampling_seed" if path == "/generate" else "seed"
        if isinstance(params, dict) and params.get(seed) is None and path not in ("/v1/score", "/v1/embeddings"):
            params[seed] = 7
    if inner is None and path != "/v1/score":
        body["sampling_params"] = {"temperature": 0}


def normal_text(answer: httpx.Response, checkpoint: str) -> str:
    """Return status, headers and body without ids and times."""
    content = answer.content
    if answer.headers.get("content-type", "").startswith("application/x-rollout"):
        header, rows = decode_rollout(content)
        digests = [hashlib.sha256(each.tobytes()).hexdigest()[:16] for each in rows]
        content = json.dumps([header, digests], separators=(",", ":")).encode()
    text = _VOLATILE.sub(r'"\1":0', _IDS.sub("ID", content.decode("utf-8", "backslashreplace")))
    head = [f"{name}: {answer.headers[name]}" for name in HEADERS if name in answer.headers]
    return "\n".join([str(answer.status_code), *head, text.replace(checkpoint, "{checkpoint}")])


class Recorder:
    """Client of an application that sends requests one after the other."""

    def __init__(self, client: httpx.AsyncClient, checkpoint: str) -> None:
        self._client, self._checkpoint = client, checkpoint

    async def names(self) -> dict[str, list[str]]:
        """Return the known fields by route and object."""
        objects = (await self._client.get("/v1/fields")).json()["objects"]
        return {f"{path} {each['object']}": sorted(each["fields"]) for each in objects for path in each["routes"]}

    async def answer(self, sent: Sent, *, expected: str | None = None) -> str:
        """Return the normal answer: the expected one if it comes, else one that has come twice."""
        seen: list[str] = []
        for _ in range(MAX_TRIES):
            seen.append(await self._once(sent))
            if seen[-1] == expected or (expected is None and seen[-1] in seen[:-1]):
                break
        if expected is None and seen[-1] not in seen[:-1]:
            raise AssertionError(f"{sent} has no answer twice: {seen[-2:]}")
        return seen[-1]

    async def _once(self, sent: Sent) -> str:
        while (await self._client.post("/flush_cache")).status_code != 200:
            continue  # the last request is still being released
        body = sent.body.replace(b"{checkpoint}", self._checkpoint.encode())
        headers = {"accept": sent.accept} if sent.accept else {}
        answer = await self._client.request(sent.method, sent.path, content=body, headers=headers)
        if sent.path.startswith(CONTROL):
            await self._client.post("/continue_generation")
            await self._client.post("/update_weight_version", json={"new_version": "0"})
        return normal_text(answer, self._checkpoint)


@contextlib.contextmanager
def steady_events(engine: Engine, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Have each step send its outputs, and wait until the event loop has taken those of the one before it."""
    cycle, grouping_s = engine.loop._cycle, output_dispatch.GROUPING_S_PER_SEQUENCE
    step = cycle.run

    def run_after_turns() -> Any:
        done = threading.Event()

        def turn(number: int) -> None:
            _ = loop.call_soon(turn, number - 1) if number else done.set()

        loop.call_soon_threadsafe(turn, TURNS_PER_STEP)
        done.wait(1.0)
        return step()

    try:
        cycle.run, output_dispatch.GROUPING_S_PER_SEQUENCE = run_after_turns, 0.0
        yield
    finally:
        cycle.run, output_dispatch.GROUPING_S_PER_SEQUENCE = step, grouping_s


@contextlib.contextmanager
def engine_of(app: str, directory: Path) -> Iterator[Engine]:
    """Run the engine of an application."""
    if app == "plain":
        path = write_checkpoint(directory / "tiny", PRESETS["tiny"], dtype="float32")
        with Engine(model_path=str(path), **SERVED) as engine:
            yield engine
        return
    from tests.support.models.scripted import scripted_engine  # noqa: PLC0415 (imports the current tree)

    with scripted_engine(directory) as engine:
        yield engine


async def record(engine: Engine, app: str, *, seed: int, num_drawn: int, like: list[dict] | None) -> list[dict]:
    """Return the requests to an application with their answers."""
    api = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=600) as client:
        recorder, generator = Recorder(client, engine.loop.card.path), random.Random(f"{seed} {app}")
        with steady_events(engine, asyncio.get_running_loop()):
            if like is not None:
                return [_row(sent, await recorder.answer(sent, expected=told)) for sent, told in map(_read, like)]
            requests = [
                Sent(app, method, path, b"" if body is None else json.dumps(body).encode())
                for method, path, body in (FIXED if app == "plain" else FIXED_CHATS)
            ]
            names = await recorder.names()
            requests += [draw(generator, names, app) for _ in range(num_drawn)]
            return [_row(sent, await recorder.answer(sent)) for sent in requests]


def _read(row: Mapping[str, Any]) -> tuple[Sent, str]:
    app, method, path, body, accept = row["sent"]
    return Sent(app, method, path, base64.b64decode(body), accept), row["told"]


def _row(sent: Sent, told: str) -> dict[str, Any]:
    body = base64.b64encode(sent.body).decode()
    return {"sent": [*sent[:3], body, sent.accept], "told": told}


def run(file: Path, *, seed: int = 0, like: Path | None = None, drawn: Mapping[str, int] | None = None) -> None:
    """Record the answers of both applications in a file."""
    before = None if like is None else json.loads(like.read_text(encoding="utf-8"))
    rows: list[dict] = []
    for app, number in (NUM_DRAWN if drawn is None else drawn).items():
        sent = None if before is None else [row for row in before if row["sent"][0] == app]
        with tempfile.TemporaryDirectory() as directory, engine_of(app, Path(directory)) as engine:
            rows += asyncio.run(record(engine, app, seed=seed, num_drawn=number, like=sent))
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    statuses = [row["told"][:3] for row in rows]
    counts = ", ".join(f"{status}: {statuses.count(status)}" for status in sorted(set(statuses)))
    sys.stdout.write(f"{len(rows)} answers ({counts})\n")


def compare(before: Path, after: Path) -> int:
    """Print every answer that differs; return their number."""
    old, new = (json.loads(each.read_text(encoding="utf-8")) for each in (before, after))
    num_differing = 0
    for one, other in zip(old, new, strict=True):
        assert one["sent"] == other["sent"], "both files hold answers to the same bodies"
        if one["told"] == other["told"]:
            continue
        num_differing += 1
        _, method, path, body, accept = one["sent"]
        sys.stdout.write(f"{method} {path} {accept} {base64.b64decode(body)[:_MAX_TOLD]!r}\n")
        sys.stdout.write(f"  before: {one['told'][:_MAX_TOLD]}\n  after:  {other['told'][:_MAX_TOLD]}\n")
    sys.stdout.write(f"{len(old) - num_differing} answers equal, {num_differing} differ\n")
    return num_differing


def main() -> int:
    """Run the command of the arguments."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    running, comparing = commands.add_parser("run"), commands.add_parser("compare")
    running.add_argument("file", type=Path)
    running.add_argument("--like", type=Path)
    running.add_argument("--seed", type=int, default=0)
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return int(compare(options.before, options.after) > 0)
    run(options.file, seed=options.seed, like=options.like)
    return 0


if __name__ == "__main__":
    sys.exit(main())
