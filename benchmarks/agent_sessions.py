"""Agents' sessions above and below saturation: time of a session and to a first token, by order of admission.

    python -m benchmarks.agent_sessions [--sessions 60,125,250,500] [--turns 20] [--model qwen3-30b-a3b]
        [--topology v6e:2x4] [--data-ranks 4] [--out FILE.json]
    python -m benchmarks.agent_sessions --hints none,names,final,ttl [--begin 600] [--edits 0.1] [--pool-share 0.25]
        [--others 4]

Simulated time, as in `benchmarks.fleet_simulation`, on one replica. All sessions begin within 30 s. Turns follow the
shape `agents`, after Mooncake's trace of agents, with `--turns` turns in the mean; tools take 4 s between two turns.
`arrival` admits waiting requests in order of arrival; `front` prefers the most cached of the first eight, as SGLang
does; `cached` is the product's order.

`--hints` compares hints about sessions instead: `names` of sessions, `final` turns, and a TTL of 300 s on every turn
(`ttl`, and `ttl+final`) with the share of the pool that may be protected, such as `ttl:0.5`. With `--edits`, turns edit
the history with this probability: a random number of its last tokens is left out. `--others` requests a second are
chats of one turn without hints, while sessions begin; figures are of the sessions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from heapq import merge
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import agent_sessions, session_hints
from benchmarks.simulation.fleet import Seen, simulate
from benchmarks.simulation.replica import SessionHints, SimulatedReplica
from benchmarks.simulation.slices import slice_replica
from benchmarks.simulation.workloads import SHAPES, Conversation, conversation_at, drawn
from rayserve_moe.scheduling import scheduler
from rayserve_moe.scheduling.sequence import Sequence as Waiting

BEGIN_S, TOOL_S, TTL_S = 30.0, 4.0, 300.0
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


def sessions(count: int, *, turns: float, seed: int, begin_s: float = BEGIN_S) -> Iterator[Conversation]:
    """Yield sessions by start time."""
    draw = np.random.default_rng(seed)
    shape = replace(SHAPES["agents"], turns=turns, gap_s=TOOL_S)
    for at in np.sort(draw.uniform(0, begin_s, count)).tolist():
        yield conversation_at(shape, at, draw)


def edited(conversation: Conversation, *, probability: float, draw: np.random.Generator) -> Conversation:
    """Return a session in which some turns leave out the end of the history, but not its first prompt."""
    turns, length = list(conversation.turns), 0
    for place, (turn, following) in enumerate(pairwise(conversation.turns)):
        length += turn.num_answer + (turn.num_tokens if place else 0)
        if draw.random() < probability:
            dropped = int(draw.integers(0, length + 1))
            turns[place + 1], length = replace(following, num_dropped=dropped), length - dropped
    return replace(conversation, turns=tuple(turns))


def hints_of(text: str) -> tuple[SessionHints, float]:
    """Return the hints of a name such as `ttl+final:0.5`, and the share of the pool that may be protected."""
    kinds, _, share = text.partition(":")
    asked = set(kinds.split("+"))
    if not asked <= {"none", "names", "final", "ttl"}:
        raise argparse.ArgumentTypeError("hints are none, names, final or ttl, several joined by +")
    names, ttl_s = bool(asked & {"names", "final"}), TTL_S * ("ttl" in asked)
    return SessionHints(names, final="final" in asked, ttl_s=ttl_s), float(share or 0.5) if ttl_s else 0.0


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


def run_hints(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate all hints at every number of sessions, all with the same sessions."""
    sizes = {"page_size": LIMITS.page_size, "longest": LIMITS.max_tokens - 1}
    found = slice_replica(arguments.model, arguments.topology, num_data_ranks=arguments.data_ranks, **sizes)
    num_pages = int(found.num_pages * arguments.pool_share)
    limits = replace(LIMITS, num_data_ranks=found.num_data_ranks, num_pages=num_pages, max_protected_s=TTL_S)
    rows = []
    for count in arguments.sessions:
        draw = np.random.default_rng(arguments.seed)
        agents = [
            edited(one, probability=arguments.edits, draw=draw)
            for one in sessions(count, turns=arguments.turns, seed=arguments.seed, begin_s=arguments.begin)
        ]
        asked = [*merge(agents, others(arguments), key=lambda one: one.starts_at)]
        for name in arguments.hints:
            hints, share = hints_of(name)
            here = replace(limits, ranks_sessions=hints.names, protected_share=share)
            how = {"num_replicas": 1, "request_s": found.steps.request_s, "seed": arguments.seed}
            make = partial(SimulatedReplica, here, found.steps, hints=hints)
            seen = simulate("round robin", make, asked, **how)
            seen.asked = [one for one in seen.asked if one.conversation.sends_hints]
            over_pool = mean_live_tokens(seen) / (num_pages * found.num_data_ranks * LIMITS.page_size)
            rows.append({"sessions": count, "over_pool": over_pool, "hints": name, **figures(seen)})
            note(f"{count} sessions, {name}: {rows[-1]['session_mean_s']:.1f} s each, {rows[-1]['hits']:.1%} cached")
    scene = {"turns": arguments.turns, "begin_s": arguments.begin, "edits": arguments.edits, "others": arguments.others}
    return {"replica": f"{arguments.model} on {arguments.topology}", **scene, "rows": rows}


def others(arguments: argparse.Namespace) -> Iterator[Conversation]:
    """Yield chats without hints by start time."""
    if arguments.others:
        num_requests = round(arguments.others * arguments.begin)
        for one in drawn(SHAPES["chat"], rate=arguments.others, num_requests=num_requests, seed=arguments.seed + 1):
            yield replace(one, sends_hints=False)


def mean_live_tokens(seen: Seen) -> float:
    """Return the tokens of sessions that have begun and not ended, in the mean while sessions begin."""
    spans: dict[int, list[Any]] = {}
    for asked in seen.asked:
        spans.setdefault(id(asked.conversation), []).append(asked)
    alive = sum(
        max(asked.num_given for asked in turns)
        * (max(asked.last_at for asked in turns) - min(asked.arrived_at for asked in turns))
        for turns in spans.values()
    )
    return alive / seen.ended_at


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
    parser.add_argument("--hints", type=lambda text: text.split(","), help="none, names, final, ttl:SHARE, joined by +")
    parser.add_argument("--begin", type=float, default=BEGIN_S, help="seconds within which sessions begin, with hints")
    parser.add_argument("--edits", type=float, default=0.0, help="probability of an edited history per turn")
    parser.add_argument("--others", type=float, default=0.0, help="chats of one turn per second, without hints")
    parser.add_argument("--pool-share", type=float, default=1.0, help="of the pages that fit, with hints")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    load_before = load_before_start()
    if arguments.hints:
        compared = run_hints(arguments)
        out = arguments.out or RESULTS / "session_hints.json"
        save({"hints_machine": machine_facts(load_before), "session_hints": compared}, out)
        print(session_hints(compared))
        return
    measured = run(arguments)
    out = arguments.out or RESULTS / "agent_sessions.json"
    save({"sessions_machine": machine_facts(load_before), "agent_sessions": measured}, out)
    print(agent_sessions(measured))


if __name__ == "__main__":
    main()
