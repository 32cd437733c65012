"""Agents' sessions on a served engine: orders of admission and hints, in alternating runs.

    python -m benchmarks.served_sessions [--size small] [--sessions 16] [--over-pool 3.3] [--repeats 2]
        [--out FILE.json]

One process serves over HTTP and plays the sessions, each side in every repeat, with an empty prefix cache and the same
sessions. Sides are `arrival` and `cached`, as in `benchmarks.agent_sessions`, and `cached` with hints: every turn names
its session and asks to be kept, and the last one says so. Answers are compared with those of the first side.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.agent_sessions import figures, ordered
from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.fleet_table import served_sessions
from benchmarks.simulation.client import play
from benchmarks.simulation.fleet import Seen
from benchmarks.simulation.replica import NO_HINTS, SessionHints
from benchmarks.simulation.workloads import Conversation, Shape, conversation_at
from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.serving.http_server import running

SHAPE = Shape((60, 0.6), (12, 0.5), common=64, turns=6.0, gap_s=0.5, longest=600)
BEGIN_S = 2.0
PAGE_SIZE, ROWS, STEP_TOKENS = 16, 8, 256
SIDES: dict[str, tuple[str, SessionHints]] = {
    "arrival": ("arrival", NO_HINTS),
    "cached": ("cached", NO_HINTS),
    "cached, hints": ("cached", SessionHints(names=True, final=True, ttl_s=300.0)),
}
"""Order of admission and hints of the clients."""


def sessions(count: int, *, seed: int) -> list[Conversation]:
    """Return sessions by start time."""
    draw = np.random.default_rng(seed)
    return [conversation_at(SHAPE, at, draw) for at in np.sort(draw.uniform(0, BEGIN_S, count)).tolist()]


def settings(roots: Sequence[Conversation], *, over_pool: float) -> dict[str, Any]:
    """Return settings of a pool that the tokens of the sessions exceed by a factor."""
    num_tokens = sum(one.num_tokens for one in roots)
    return {
        "page_size": PAGE_SIZE,
        "num_pages": 1 + int(num_tokens / over_pool / PAGE_SIZE),
        "max_model_len": SHAPE.longest + PAGE_SIZE,
        "max_running_requests": ROWS,
        "max_step_tokens": STEP_TOKENS,
        "structured_output": False,
    }


def prompts_of(seen: Seen, roots: Sequence[Conversation]) -> dict[tuple[int, int], list[int]]:
    """Return the prompts by session and turn; each contains the answers to all turns before."""
    places = {id(one): place for place, one in enumerate(roots)}
    return {(places[id(asked.conversation)], asked.turn): asked.prompt.tolist() for asked in seen.asked}


def measure(engine: Engine, roots: list[Conversation], *, vocab_size: int, repeats: int) -> list[dict[str, Any]]:
    """Return figures of every side in every repeat; a first play, which compiles steps, is not counted."""
    rows: list[dict[str, Any]] = []
    with running(create_api(ApiState(engine.loop, engine.tokenizer))) as url:
        address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 0))

        def played(side: str) -> Seen:
            order, hints = SIDES[side]
            httpx.post(f"{url}/flush_cache", timeout=60).raise_for_status()
            with ordered(order):
                return asyncio.run(play(address, roots, vocab_size=vocab_size, num_replicas=1, hints=hints))

        first = prompts_of(played(next(iter(SIDES))), roots)
        for repeat in range(repeats):
            for side in SIDES:
                seen = played(side)
                equal = float(np.mean([prompt == first[turn] for turn, prompt in prompts_of(seen, roots).items()]))
                rows.append({"side": side, "equal": equal, **figures(seen, roots=roots)})
                note(f"{side} {repeat + 1}/{repeats}: {rows[-1]}")
    return rows


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(PRESETS), default="small")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--over-pool", type=float, default=3.3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "served_sessions.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    roots = sessions(arguments.sessions, seed=arguments.seed)
    path, vocab_size = checkpoint_of(arguments.size), PRESETS[arguments.size].vocab_size
    with Engine(str(path), **settings(roots, over_pool=arguments.over_pool)) as engine:
        rows = measure(engine, roots, vocab_size=vocab_size, repeats=arguments.repeats)
        facts = conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
    measured = {"sessions": arguments.sessions, "over_pool": arguments.over_pool, "rows": rows}
    save({**facts, "served_sessions": measured}, arguments.out)
    print(served_sessions(measured))


if __name__ == "__main__":
    main()
