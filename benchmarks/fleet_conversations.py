"""Conversations against a served fleet: prompt tokens computed against one replica that has the cache of all.

    python -m benchmarks.fleet_conversations [--replicas 4] [--size tiny] [--pages 1200] [--repeats 3] [--out FILE.json]

16 conversations of 8 turns, all at once, each turn as soon as the one before is answered. The fleet's replicas share
the pages of the one; it is asked through the routers of prefixes, and by HAProxy in turn. Before every repeat all
caches are flushed. Where the machine has too few cores, Ray is told that it has more: figures of time are then theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.conversations import ANSWER_TOKENS, NEW_PROMPT_TOKENS
from benchmarks.fleet_table import fleet_conversations as as_table
from benchmarks.serve_process import HOST, ServeProcess
from benchmarks.simulation.client import play
from benchmarks.simulation.workloads import Conversation, Turn
from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.fleet.load_average import AVERAGED_S

CONVERSATIONS, TURNS = 16, 8
PAGE_SIZE = 16
ONE, PREFIX, IN_TURN = "one replica", "by prefix", "round robin"
CPUS_OF_REPLICA = 1
TTFT_S, TPOT_S = 2.0, 0.2


def conversations(seed: int) -> list[Conversation]:
    """Return conversations without common tokens, also between seeds."""
    draw = np.random.default_rng(seed)

    def turn() -> Turn:
        return Turn(((int(draw.integers(1, 1 << 62)), int(draw.integers(*NEW_PROMPT_TOKENS))),), ANSWER_TOKENS)

    return [Conversation(0.0, tuple(turn() for _ in range(TURNS))) for _ in range(CONVERSATIONS)]


def settings(size: str, *, side: str, num_replicas: int, num_pages: int) -> dict[str, Any]:
    """Return the settings of a side, whose replicas have `num_pages` together."""
    number = 1 if side == ONE else num_replicas
    return {
        "model_path": str(checkpoint_of(size)),
        "num_replicas": number,
        "num_pages": num_pages // number,
        "page_size": PAGE_SIZE,
        "max_model_len": TURNS * (NEW_PROMPT_TOKENS[1] + ANSWER_TOKENS),
        "max_running_requests": CONVERSATIONS,
        "precompile_bs_paddings": [CONVERSATIONS],
        "structured_output": False,
        "prefix_routing": "off" if side == IN_TURN else "auto",
    }


@contextmanager
def environment_for(side: str, num_replicas: int) -> Iterator[None]:
    """Have Ray offer a CPU for each replica, and HAProxy ask them in turn where that is the side."""
    cpus = max(os.cpu_count() or 1, CPUS_OF_REPLICA * num_replicas)
    added = {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": cpus})}
    if side == IN_TURN:
        added["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] = "roundrobin"
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def measure(size: str, *, side: str, num_replicas: int, num_pages: int, repeats: int) -> list[dict[str, float]]:
    """Return figures of every repeat, after an uncounted one."""
    how = {"vocab_size": PRESETS[size].vocab_size, "num_replicas": 1 if side == ONE else num_replicas}
    found = []
    asked = settings(size, side=side, num_replicas=num_replicas, num_pages=num_pages)
    with environment_for(side, num_replicas), ServeProcess(asked) as serve:
        for repeat in range(-1, repeats):
            httpx.post(f"http://{HOST}:{serve.port}/flush_cache", timeout=60).raise_for_status()
            time.sleep(5 * AVERAGED_S)
            seen = asyncio.run(play((HOST, serve.port), conversations(repeat + 1), **how))
            found.append(seen.figures(ttft_s=TTFT_S, tpot_s=TPOT_S))
            found[-1]["tokens_s"] *= how["num_replicas"]
            note(f"{side} {repeat + 1}/{repeats}: {found[-1]['computed']:.0f} prompt tokens computed")
    return found[1:]


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--size", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--pages", type=int, default=1200, help="of all replicas together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load_before = load_before_start()
    how = {"num_replicas": arguments.replicas, "num_pages": arguments.pages, "repeats": arguments.repeats}
    sides = {side: measure(arguments.size, side=side, **how) for side in (ONE, PREFIX, IN_TURN)}
    measured = {"size": arguments.size, "replicas": arguments.replicas, "pages": arguments.pages, "sides": sides}
    out = arguments.out or RESULTS / f"fleet_conversations-{arguments.replicas}.json"
    save({"conversations_machine": machine_facts(load_before), "fleet_conversations": measured}, out)
    print(as_table(measured))


if __name__ == "__main__":
    main()
