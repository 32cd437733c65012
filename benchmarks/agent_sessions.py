"""Agents' sessions below and above saturation: times of sessions and first tokens, by order of admission.

    python -m benchmarks.agent_sessions [--loads agents,subagents,rollouts] [--model qwen3-30b-a3b]
        [--topology v6e:2x4] [--data-ranks 4] [--out FILE.json]
    python -m benchmarks.agent_sessions --host-pages [--ratios 0.5,1.1,3.3,10]

Simulated time, as in `benchmarks.fleet_simulation`, on one replica. All sessions begin within 30 s, and tools take 4 s
between two turns. `arrival` admits waiting requests in order of arrival; `cached` is the product's order. The last rows
of a load have a third of the pages.

`--host-pages` compares agents' sessions without and with a cache of evicted pages in host memory, whose copies pass one
after the other on each chip.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import agent_sessions, host_pages
from benchmarks.simulation.fleet import Seen, simulate
from benchmarks.simulation.replica import HostMemory, SimulatedReplica
from benchmarks.simulation.slices import slice_replica
from benchmarks.simulation.workloads import SHAPES, Conversation, Span, conversation_at
from rayserve_moe.scheduling import scheduler
from rayserve_moe.scheduling.sequence import Sequence as Waiting

BEGIN_S, TOOL_S = 30.0, 4.0
TTFT_S, TPOT_S = 2.0, 0.05
"""Bounds of a good request."""


def by_arrival(waiting: Sequence[Waiting], *, cached_tokens: Callable[[Waiting], int]) -> int:
    """Return the place of the sequence that came first."""
    del waiting, cached_tokens
    return 0


ORDERS = {"arrival": by_arrival, "cached": None}


def ordered(order: str) -> AbstractContextManager[Any]:
    """Admit in an order inside the context."""
    choose = ORDERS[order]
    return nullcontext() if choose is None else patch.object(scheduler, "next_to_admit", choose)


@dataclass(frozen=True)
class Load:
    """A kind of session, each of turns like those of Mooncake's trace of agents."""

    counts: tuple[int, ...]
    """Sessions that have 0.3, 1 and 3.3 times the tokens of the pool."""
    caller_share: float = 0.0
    """Share of sessions that call subagents in a turn, which waits for all of them."""
    group: int = 1
    """Sessions that begin together with the same prompt."""


LOADS = {
    "agents": Load((23, 75, 250)),
    "subagents": Load((17, 52, 172), caller_share=0.44),
    "rollouts": Load((24, 72, 256), group=8),
}
"""`subagents` are called in 44 % of sessions, as vLLM publishes of its load AgentX; `rollouts` are groups of eight."""
HOST_BYTES = 512 << 30
"""Of the 1,536 GiB that a host of v6e has (docs.cloud.google.com/tpu/docs/v6e)."""
COPY_RATES = (10e9,)
"""Bytes per second between a chip and host memory. The link of a v6e is PCIe Gen5 (same page): 31.5e9 by 8 lanes, which
is more than a thread copies."""
RATIOS = {0.5: (9, 4), 1.1: (20, 4), 3.3: (62, 4), 10.0: (62, 12)}
"""Sessions of a ratio of their tokens to the pool, and the part of the pages that there are."""
TURNS = 20.0
"""Mean of the geometric number of a session's turns, before sessions are cut at the context."""
CALLED, CALLED_TURNS = 2, 5.0
"""Subagents of a call, and their turns in the mean (assumed)."""


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


def figures(seen: Seen, *, roots: Sequence[Conversation]) -> dict[str, float]:
    """Return times of sessions, from their first request to their last token, and of requests, and rates."""
    spans: dict[int, tuple[float, float]] = {}
    for asked in seen.asked:
        began, ended = spans.get(id(asked.conversation), (asked.arrived_at, asked.last_at))
        spans[id(asked.conversation)] = min(began, asked.arrived_at), max(ended, asked.last_at)
    session_s = np.array([spans[id(one)][1] - spans[id(one)][0] for one in roots])
    shown = ("goodput_s", "ttft_p50_s", "ttft_p99_s", "tokens_s", "hits")
    of_requests = seen.figures(ttft_s=TTFT_S, tpot_s=TPOT_S)
    return {
        "session_mean_s": float(session_s.mean()),
        "session_p99_s": float(np.quantile(session_s, 0.99)),
        **{name: of_requests[name] for name in shown},
        "ttft_max_s": max(asked.first_at - asked.arrived_at for asked in seen.asked),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate every order on every load, all with the same sessions."""
    sizes = {"page_size": LIMITS.page_size, "longest": LIMITS.max_tokens - 1}
    found = slice_replica(arguments.model, arguments.topology, num_data_ranks=arguments.data_ranks, **sizes)
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
    return {"replica": f"{arguments.model} on {arguments.topology}", "rows": rows}


def run_with_host_pages(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate agents' sessions without and with evicted pages in host memory, the same sessions for each ratio."""
    sizes = {"page_size": LIMITS.page_size, "longest": LIMITS.max_tokens - 1}
    found = slice_replica(arguments.model, arguments.topology, num_data_ranks=arguments.data_ranks, **sizes)
    num_hosted = int(HOST_BYTES / (found.page_bytes * found.num_devices))
    rates = {f"{rate / 1e9:g} GB/s": HostMemory(num_hosted, found.page_bytes / rate) for rate in COPY_RATES}
    rows = []
    for ratio in arguments.ratios:
        count, part = RATIOS[ratio]
        limits = replace(LIMITS, num_data_ranks=found.num_data_ranks, num_pages=found.num_pages // part)
        roots = list(sessions(LOADS["agents"], count, seed=arguments.seed))
        for name, host in {"none": None, **rates}.items():
            replica = SimulatedReplica(limits, found.steps, host=host)
            how = {"num_replicas": 1, "request_s": found.steps.request_s, "seed": arguments.seed}
            seen = simulate("round robin", partial(_given, replica), roots, **how)
            counts = {key: value for key, value in replica.cycle.statistics().items() if key.startswith("host_pages")}
            rows.append({"ratio": ratio, "sessions": count, "copies": name, **figures(seen, roots=roots), **counts})
            note(f"{ratio}, {name}: {rows[-1]['session_mean_s']:.0f} s each")
    return {"replica": f"{arguments.model} on {arguments.topology}", "num_hosted": num_hosted, "rows": rows}


def _given(replica: SimulatedReplica) -> SimulatedReplica:
    return replica


def main() -> None:
    """Simulate, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=lambda text: text.split(","), default=list(LOADS))
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--data-ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host-pages", action="store_true")
    parser.add_argument("--ratios", type=lambda text: [float(part) for part in text.split(",")], default=list(RATIOS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load_before = load_before_start()
    if arguments.host_pages:
        measured = run_with_host_pages(arguments)
        facts = machine_facts(load_before)
        save({"host_pages_machine": facts, "host_pages": measured}, arguments.out or RESULTS / "host_pages.json")
        print(host_pages(measured))
        return
    measured = run(arguments)
    save(
        {"sessions_machine": machine_facts(load_before), "agent_sessions": measured},
        arguments.out or RESULTS / "agent_sessions.json",
    )
    print(agent_sessions(measured))


if __name__ == "__main__":
    main()
