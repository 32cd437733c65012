"""Hints about sessions by the pressure on the pool: times of sessions and first tokens, and tokens found cached.

    python -m benchmarks.session_hints [--sessions 6,20] [--hints none,final,ttl:0.5:30]
        [--seeds 2] [--edits 0.1] [--others 4] [--pool-share 0.1] [--out FILE.json]

Simulated time, as in `benchmarks.fleet_simulation`, on one replica with a share of the pages that fit. Sessions begin
within 120 s; their turns follow the shape `agents`, after Mooncake's trace, with 10 turns in the mean and tools that
take 4 s. `--edits` of the turns leave out a random number of the last tokens of the history. Beside them, `--others`
chats of one turn come each second, without hints. Figures are of the sessions, over all seeds.

`names` of sessions order superseded branches; `final` turns end sessions as well; `ttl` asks on every turn for 300 s.
After a colon follow the share of the pool that may be protected, and the seconds that a protection may last.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from heapq import merge
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import session_hints
from benchmarks.simulation.fleet import Asked, Seen, simulate
from benchmarks.simulation.replica import SessionHints, SimulatedReplica
from benchmarks.simulation.slices import slice_replica
from benchmarks.simulation.workloads import SHAPES, Conversation, conversation_at, drawn

BEGIN_S, TTL_S = 120.0, 300.0
AGENTS = replace(SHAPES["agents"], turns=10.0, gap_s=4.0)


class Outcome(NamedTuple):
    """Figures of the requests of all sessions, an entry each."""

    session_s: np.ndarray
    """Seconds of a session, from its first request to its last token."""
    wait_s: np.ndarray
    """Seconds of a request to its first token."""
    num_given: np.ndarray
    """Prompt tokens of a request."""
    num_cached: np.ndarray
    """Prompt tokens of a request that were cached."""
    live_share: float
    """Tokens of sessions that have begun and not ended, over those of the pool, in the mean."""


def agents(count: int, *, edits: float, seed: int) -> Iterator[Conversation]:
    """Yield sessions by start time."""
    draw = np.random.default_rng(seed)
    for at in np.sort(draw.uniform(0, BEGIN_S, count)).tolist():
        yield edited(conversation_at(AGENTS, at, draw), probability=edits, draw=draw)


def edited(conversation: Conversation, *, probability: float, draw: np.random.Generator) -> Conversation:
    """Return a session in which some turns leave out the end of the history, but not its first prompt."""
    turns, length = list(conversation.turns), 0
    for place, (turn, following) in enumerate(pairwise(conversation.turns)):
        length += turn.num_answer + (turn.num_tokens if place else 0)
        if draw.random() < probability:
            dropped = int(draw.integers(0, length + 1))
            turns[place + 1], length = replace(following, num_dropped=dropped), length - dropped
    return replace(conversation, turns=tuple(turns))


def others(rate: float, *, seed: int) -> Iterator[Conversation]:
    """Yield chats without hints by start time."""
    if rate:
        for one in drawn(SHAPES["chat"], rate=rate, num_requests=round(rate * BEGIN_S), seed=seed):
            yield replace(one, sends_hints=False)


def hints_of(text: str) -> tuple[SessionHints, float, float]:
    """Return the hints of a name such as `ttl+final:0.5:30`, the share that may be protected, and for how long.

    Raises: ValueError for another name.
    """
    kinds, share, seconds = [*text.split(":"), "0", str(TTL_S)][:3]
    asked = set(kinds.split("+"))
    if not asked <= {"none", "names", "final", "ttl"}:
        raise ValueError("hints are none, names, final or ttl, several joined by +")
    ttl_s = TTL_S if "ttl" in asked else 0.0
    return SessionHints(bool(asked & {"names", "final"}), "final" in asked, ttl_s), float(share), float(seconds)


def outcome_of(seen: Seen, *, num_pool_tokens: int) -> Outcome:
    """Return the figures of the sessions."""
    sessions: dict[int, list[Asked]] = {}
    for asked in seen.asked:
        if asked.conversation.sends_hints:
            sessions.setdefault(id(asked.conversation), []).append(asked)
    session_s = [
        max(one.last_at for one in turns) - min(one.arrived_at for one in turns) for turns in sessions.values()
    ]
    sizes = [max(one.num_given for one in turns) for turns in sessions.values()]
    every = [one for turns in sessions.values() for one in turns]
    return Outcome(
        np.array(session_s),
        np.array([one.first_at - one.arrived_at for one in every]),
        np.array([one.num_given for one in every]),
        np.array([one.num_cached for one in every]),
        float(np.dot(session_s, sizes)) / seen.ended_at / num_pool_tokens,
    )


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    """Return the figures of several seeds together."""
    session_s, wait_s, given, cached = (np.concatenate(each) for each in list(zip(*outcomes, strict=True))[:4])
    return {
        "over_pool": float(np.mean([each.live_share for each in outcomes])),
        "session_mean_s": float(session_s.mean()),
        "ttft_p50_s": float(np.quantile(wait_s, 0.5)),
        "ttft_p99_s": float(np.quantile(wait_s, 0.99)),
        "hits": float(cached.sum() / given.sum()),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate all hints at every number of sessions, with the same sessions for each."""
    sizes = {"page_size": LIMITS.page_size, "longest": LIMITS.max_tokens - 1}
    found = slice_replica(arguments.model, arguments.topology, num_data_ranks=1, **sizes)
    num_pages = int(found.num_pages * arguments.pool_share)
    limits = replace(LIMITS, num_pages=num_pages)
    rows = []
    for count in arguments.sessions:
        for name in arguments.hints:
            hints, share, max_s = hints_of(name)
            make = partial(
                SimulatedReplica,
                replace(limits, evicts_by_session=hints.names, protected_share=share, max_protected_s=max_s),
                found.steps,
                hints=hints,
            )
            outcomes = []
            for seed in range(arguments.seeds):
                sessions = agents(count, edits=arguments.edits, seed=seed)
                asked = merge(sessions, others(arguments.others, seed=seed), key=lambda one: one.starts_at)
                seen = simulate("round robin", make, asked, num_replicas=1, request_s=found.steps.request_s, seed=seed)
                outcomes.append(outcome_of(seen, num_pool_tokens=num_pages * LIMITS.page_size))
            rows.append({"sessions": count, "hints": name, **figures(outcomes)})
            note(f"{count} sessions, {name}: {rows[-1]}")
    scene = {"edits": arguments.edits, "others": arguments.others, "seeds": arguments.seeds, "num_pages": num_pages}
    return {"replica": f"{arguments.model} on {arguments.topology}", **scene, "rows": rows}


def main() -> None:
    """Simulate, write the result file, print its table."""

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=lambda text: [int(part) for part in names(text)], default="6,20")
    parser.add_argument("--hints", type=names, default="none,final,ttl:0.5:300,ttl:0.5:30,ttl+final:0.5:30")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--edits", type=float, default=0.1, help="share of turns that edit the history")
    parser.add_argument("--others", type=float, default=4.0, help="chats of one turn per second, without hints")
    parser.add_argument("--pool-share", type=float, default=0.1, help="of the pages that fit")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--out", type=Path, default=RESULTS / "session_hints.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    measured = run(arguments)
    save({"hints_machine": machine_facts(load_before), "session_hints": measured}, arguments.out)
    print(session_hints(measured))


if __name__ == "__main__":
    main()
