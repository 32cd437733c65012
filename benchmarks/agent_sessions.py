"""Agents' sessions below and above saturation: times of sessions and first tokens, by order of admission.

    python -m benchmarks.agent_sessions [--loads agents,subagents,rollouts] [--seed 0] [--model qwen3-30b-a3b]
        [--topology v6e:2x4] [--data-ranks 4] [--out FILE.json]

Simulated time, as in `benchmarks.fleet_simulation`, on one replica. All sessions begin within 30 s. A tool runs for 4 s
between two turns. `arrival` admits requests in order of arrival, and none while an earlier one has to wait; `cached` is
the product's order. The last two rows of a load have a third of the pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import agent_sessions
from benchmarks.simulation.fleet import Seen, simulate
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.slices import SliceReplica, slice_replica
from benchmarks.simulation.workloads import SHAPES, Conversation, Span, conversation_at
from rayserve_moe.scheduling import scheduler
from rayserve_moe.scheduling.rank_step import RankStep
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.waiting_queue import WaitingQueue

BEGIN_S, TOOL_S = 30.0, 4.0
TTFT_S, TPOT_S = 2.0, 0.05
"""Bounds of a good request."""


ORDERS = ("arrival", "cached")


@contextmanager
def ordered(order: str) -> Iterator[None]:
    """Make schedulers admit in this order."""
    if order == "cached":
        yield
        return
    admit_next = Scheduler._admit_next

    def first_come(self: Scheduler, steps: list[RankStep], closed: set[int]) -> bool:
        """Admit the sequence that came first; return False if it has to wait."""
        return admit_next(self, steps, closed) and not closed

    def first(waiting: WaitingQueue, *, cached_tokens: object, among: np.ndarray | None = None) -> int:
        return 0 if among is None else int(among[0])

    by_arrival = patch.object(scheduler, "next_to_admit", first)
    with by_arrival, patch.object(Scheduler, "_admit_next", first_come):
        yield


@dataclass(frozen=True)
class Load:
    """A kind of session, with turns as in Mooncake's trace of agents."""

    counts: tuple[int, ...]
    """Sessions whose tokens are 0.3, 1 and 3.3 times those of the pool."""
    caller_share: float = 0.0
    """Share of sessions with a turn that calls subagents and waits for all of them."""
    group: int = 1
    """Sessions that begin together with the same prompt."""


LOADS = {
    "agents": Load((23, 75, 250)),
    "subagents": Load((17, 52, 172), caller_share=0.44),
    "rollouts": Load((24, 72, 256), group=8),
}
"""Loads by name. 44 % of sessions call subagents, as in vLLM's AgentX. Rollouts come in groups of eight."""
TURNS = 20.0
"""Mean of the geometric number of turns, before sessions are cut at the maximum context."""
CALLED, CALLED_TURNS = 2, 5.0
"""Subagents of a call, and the mean number of their turns (assumed)."""


def sessions(load: Load, count: int, *, seed: int) -> Iterator[Conversation]:
    """Yield sessions by start time."""
    draw = np.random.default_rng(seed)
    shape = replace(SHAPES["agents"], turns=TURNS, gap_s=TOOL_S)
    starts = np.sort(draw.uniform(0, BEGIN_S, -(-count // load.group))).repeat(load.group)
    first: tuple[Span, ...] = ()
    for number, at in enumerate(starts[:count].tolist()):
        one = conversation_at(shape, at, draw)
        first = one.turns[0].spans if number % load.group == 0 else first
        turns = [replace(one.turns[0], spans=first), *one.turns[1:]]
        while len(turns) > 1 and Conversation(at, tuple(turns)).num_tokens > shape.longest:
            turns.pop()
        if load.caller_share and len(turns) > 1 and draw.random() < load.caller_share:
            place = int(draw.integers(1, len(turns)))
            called = (conversation_at(replace(shape, turns=CALLED_TURNS), 0.0, draw) for _ in range(CALLED))
            turns[place] = replace(turns[place], calls=tuple(called))
        yield Conversation(at, tuple(turns))


def session_seconds(seen: Seen, *, roots: Sequence[Conversation]) -> np.ndarray:
    """Return the seconds of each session that was seen, from its first request to its last token, float64."""
    spans: dict[int, tuple[float, float]] = {}
    for asked in seen.asked:
        began, ended = spans.get(id(asked.conversation), (asked.arrived_at, asked.last_at))
        spans[id(asked.conversation)] = min(began, asked.arrived_at), max(ended, asked.last_at)
    return np.array([spans[id(one)][1] - spans[id(one)][0] for one in roots if id(one) in spans])


def figures(seen: Seen, *, roots: Sequence[Conversation]) -> dict[str, float]:
    """Return times of sessions and of requests, rates, and the share of prompt tokens found cached."""
    session_s = session_seconds(seen, roots=roots)
    shown = ("goodput_s", "ttft_p50_s", "ttft_p99_s", "tokens_s", "hits")
    of_requests = seen.figures(ttft_s=TTFT_S, tpot_s=TPOT_S)
    return {
        "session_mean_s": float(session_s.mean()),
        "session_p99_s": float(np.quantile(session_s, 0.99)),
        **{name: of_requests[name] for name in shown},
        "ttft_max_s": max(asked.first_at - asked.arrived_at for asked in seen.asked),
    }


def run(arguments: argparse.Namespace, found: SliceReplica) -> dict[str, Any]:
    """Simulate both orders on every load, with the same sessions."""
    rows = []
    for name in arguments.loads:
        counts = LOADS[name].counts
        for count, part in [*((count, 1) for count in counts), (counts[-1], 3)]:
            limits = replace(LIMITS, num_data_ranks=found.num_data_ranks, num_pages=found.num_pages // part)
            roots = list(sessions(LOADS[name], count, seed=arguments.seed))
            num_held = limits.num_pages * limits.num_data_ranks * limits.page_size
            over_pool = sum(one.num_tokens for one in roots) / num_held
            for order in ORDERS:
                how = {"num_replicas": 1, "request_s": found.steps.request_s, "seed": arguments.seed}
                with ordered(order):
                    seen = simulate("round robin", partial(SimulatedReplica, limits, found.steps), roots, **how)
                given = {"load": name, "sessions": count, "over_pool": over_pool, "order": order}
                rows.append({**given, **figures(seen, roots=roots)})
                note(f"{count} {name}, {order}: {rows[-1]['session_mean_s']:.0f} s each")
    return {"rows": rows}


def measure_on_slice(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, SliceReplica], dict[str, Any]],
    *,
    name: str,
    machine: str,
    table: Callable[[Mapping[str, Any]], str],
) -> None:
    """Parse the command line, measure on a simulated replica, write the result file, print its table.

    `name` and `machine` are the keys of the result and of the machine in the file.
    """
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    sizes = {"page_size": LIMITS.page_size, "longest": LIMITS.max_tokens - 1}
    found = slice_replica(arguments.model, arguments.topology, num_data_ranks=arguments.data_ranks, **sizes)
    measured = {"replica": f"{arguments.model} on {arguments.topology}", **measure(arguments, found)}
    save({machine: machine_facts(load_before), name: measured}, arguments.out)
    print(table(measured))


def main() -> None:
    """Measure orders of admission."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=lambda text: text.split(","), default=list(LOADS))
    parser.add_argument("--data-ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    measure_on_slice(parser, run, name="agent_sessions", machine="sessions_machine", table=agent_sessions)


if __name__ == "__main__":
    main()
