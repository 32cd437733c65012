"""Agents' sessions above and below saturation: time of a session and to a first token, by order of admission.

    python -m benchmarks.agent_sessions [--sessions 60,125,250,500] [--turns 20] [--model qwen3-30b-a3b]
        [--topology v6e:2x4] [--data-ranks 4] [--out FILE.json]

Simulated time, as in `benchmarks.fleet_simulation`, on one replica. All sessions begin within 30 s. Turns follow the
shape `agents`, after Mooncake's trace of agents, with `--turns` turns in the mean; tools take 4 s between two turns.
`arrival` admits waiting requests in order of arrival; `front` prefers the most cached of the first eight, as SGLang
does; `cached` is the product's order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import agent_sessions
from benchmarks.simulation.fleet import Seen, simulate
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.slices import slice_replica
from benchmarks.simulation.workloads import SHAPES, Conversation, conversation_at
from rayserve_moe.scheduling import scheduler
from rayserve_moe.scheduling.sequence import Sequence as Waiting

BEGIN_S, TOOL_S = 30.0, 4.0
FIRST_COMPARED, MAX_PASSED_OVER = 8, 16
"""Limits of the order `front`."""


def by_arrival(waiting: Sequence[Waiting], *, cached_tokens: Callable[[Waiting], int]) -> int:
    """Return the place of the sequence that came first."""
    del waiting, cached_tokens
    return 0


def by_front(waiting: Sequence[Waiting], *, cached_tokens: Callable[[Waiting], int]) -> int:
    """Return the place of the most cached of the first few sequences, or of one that was passed over too often."""
    queue, priority = waiting[0].queue, waiting[0].request.priority
    if queue.num_to_recompute or queue.num_passed_over >= MAX_PASSED_OVER:
        return 0
    equals = takewhile(lambda each: each.request.priority == priority, islice(waiting, FIRST_COMPARED))
    cached = [cached_tokens(each) for each in equals]
    return cached.index(max(cached))


ORDERS = {"arrival": by_arrival, "front": by_front, "cached": None}


def ordered(order: str) -> AbstractContextManager[Any]:
    """Admit in an order inside the context."""
    choose = ORDERS[order]
    return nullcontext() if choose is None else patch.object(scheduler, "next_to_admit", choose)


def sessions(count: int, *, turns: float, seed: int) -> Iterator[Conversation]:
    """Yield sessions by start time."""
    draw = np.random.default_rng(seed)
    shape = replace(SHAPES["agents"], turns=turns, gap_s=TOOL_S)
    for at in np.sort(draw.uniform(0, BEGIN_S, count)).tolist():
        yield conversation_at(shape, at, draw)


def figures(seen: Seen) -> dict[str, float]:
    """Return times of sessions and requests, and rates."""
    spans: dict[int, tuple[float, float]] = {}
    for asked in seen.asked:
        began, ended = spans.get(id(asked.conversation), (asked.arrived_at, asked.last_at))
        spans[id(asked.conversation)] = min(began, asked.arrived_at), max(ended, asked.last_at)
    session_s = np.array([ended - began for began, ended in spans.values()])
    waits = np.array([asked.first_at - asked.arrived_at for asked in seen.asked])
    num_tokens = sum(asked.conversation.turns[asked.turn].num_answer for asked in seen.asked)
    return {
        "session_mean_s": float(session_s.mean()),
        "session_p99_s": float(np.quantile(session_s, 0.99)),
        "ttft_p50_s": float(np.quantile(waits, 0.5)),
        "ttft_p99_s": float(np.quantile(waits, 0.99)),
        "tokens_s": num_tokens / seen.ended_at,
        "hits": sum(asked.num_cached for asked in seen.asked) / sum(asked.num_given for asked in seen.asked),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate every order at every number of sessions, all with the same sessions."""
    sizes = {"page_size": LIMITS.page_size, "longest": LIMITS.max_tokens - 1}
    found = slice_replica(arguments.model, arguments.topology, num_data_ranks=arguments.data_ranks, **sizes)
    limits = replace(LIMITS, num_data_ranks=found.num_data_ranks, num_pages=found.num_pages)
    num_held = limits.num_pages * limits.num_data_ranks * limits.page_size
    rows = []
    for count in arguments.sessions:
        asked = list(sessions(count, turns=arguments.turns, seed=arguments.seed))
        over_pool = sum(one.num_tokens for one in asked) / num_held
        for order in ORDERS:
            how = {"num_replicas": 1, "request_s": found.steps.request_s, "seed": arguments.seed}
            with ordered(order):
                seen = simulate("round robin", lambda: SimulatedReplica(limits, found.steps), asked, **how)
            rows.append({"sessions": count, "over_pool": over_pool, "order": order, **figures(seen)})
            note(f"{count} sessions, {order}: {rows[-1]['session_mean_s']:.0f} s each")
    return {"replica": f"{arguments.model} on {arguments.topology}", "turns": arguments.turns, "rows": rows}


def main() -> None:
    """Simulate, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sessions", type=lambda text: [int(part) for part in text.split(",")], default="60,125,250,500"
    )
    parser.add_argument("--turns", type=float, default=20.0)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--data-ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "agent_sessions.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    measured = run(arguments)
    save({"sessions_machine": machine_facts(load_before), "agent_sessions": measured}, arguments.out)
    print(agent_sessions(measured))


if __name__ == "__main__":
    main()
