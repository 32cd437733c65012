"""Hints about sessions, by the pressure on the pool: goodput, times of sessions and first tokens, cached tokens.

    python -m benchmarks.session_hints [--sessions 6,20,60,160] [--hints none,final,ttl:0.5:30]
        [--seeds 2] [--edits 0.1] [--others 4] [--pool-share 0.1] [--out FILE.json]

Simulated time, as in `benchmarks.fleet_simulation`, on one replica with a share of the pages that fit. Sessions begin
within 120 s. Their turns have the shape `agents`, after Mooncake's trace, with a mean of 10 turns and tools that run
for 4 s. A share `--edits` of the turns leaves out a random number of the last tokens of the history. In addition,
`--others` chats of one turn come per second, without hints. All figures are of the sessions, means over the seeds.

`names` names the session on every turn, so that superseded branches go first. `final` also marks the last turn. `ttl`
asks on every turn for 300 s. After a colon follow the share of the pool that may be protected, and the maximum seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from heapq import merge
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.agent_sessions import figures, measure_on_slice, session_seconds
from benchmarks.conditions import note
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import session_hints
from benchmarks.simulation.fleet import Seen, simulate
from benchmarks.simulation.replica import SessionHints, SimulatedReplica
from benchmarks.simulation.slices import SliceReplica
from benchmarks.simulation.workloads import SHAPES, Conversation, conversation_at, drawn

BEGIN_S, TTL_S = 120.0, 300.0
AGENTS = replace(SHAPES["agents"], turns=10.0, gap_s=4.0)


def agents(count: int, *, edits: float, seed: int) -> Iterator[Conversation]:
    """Yield sessions by start time."""
    draw = np.random.default_rng(seed)
    for at in np.sort(draw.uniform(0, BEGIN_S, count)).tolist():
        yield edited(conversation_at(AGENTS, at, draw), probability=edits, draw=draw)


def edited(conversation: Conversation, *, probability: float, draw: np.random.Generator) -> Conversation:
    """Return a session in which some turns leave out the end of the history, but keep its first prompt."""
    turns, length = list(conversation.turns), 0
    for place, (turn, following) in enumerate(pairwise(conversation.turns)):
        length += turn.num_answer + (turn.num_tokens if place else 0)
        if draw.random() < probability:
            dropped = int(draw.integers(0, length + 1))
            turns[place + 1], length = replace(following, num_dropped=dropped), length - dropped
    return replace(conversation, turns=tuple(turns))


def others(rate: float, *, seed: int) -> Iterator[Conversation]:
    """Yield chats without hints by start time, `rate` per second."""
    if rate:
        for one in drawn(SHAPES["chat"], rate=rate, num_requests=round(rate * BEGIN_S), seed=seed):
            yield replace(one, sends_hints=False)


def hints_of(text: str) -> tuple[SessionHints, float, float]:
    """Return the hints of a name such as `ttl+final:0.5:30`, the share that may be protected, and the maximum seconds.

    Raises: ValueError for another name.
    """
    kinds, share, seconds = [*text.split(":"), "0", str(TTL_S)][:3]
    asked = set(kinds.split("+"))
    if not asked <= {"none", "names", "final", "ttl"}:
        raise ValueError("hints are none, names, final or ttl, several joined by +")
    ttl_s = TTL_S if "ttl" in asked else 0.0
    return SessionHints(bool(asked & {"names", "final"}), "final" in asked, ttl_s), float(share), float(seconds)


def figures_of_sessions(seen: Seen, *, num_pool_tokens: int) -> dict[str, float]:
    """Return the figures of the sessions alone, and the mean of their live tokens over those of the pool.

    A session is live from its first request to its last token, with the tokens of its longest prompt.
    """
    alone = replace(seen, asked=[asked for asked in seen.asked if asked.conversation.sends_hints])
    roots = list({id(asked.conversation): asked.conversation for asked in alone.asked}.values())
    sizes = dict.fromkeys(map(id, roots), 0)
    for asked in alone.asked:
        sizes[id(asked.conversation)] = max(sizes[id(asked.conversation)], asked.num_given)
    num_live = np.dot(session_seconds(alone, roots=roots), list(sizes.values())) / seen.ended_at
    return {"over_pool": float(num_live) / num_pool_tokens, **figures(alone, roots=roots)}


def run(arguments: argparse.Namespace, found: SliceReplica) -> dict[str, Any]:
    """Simulate all hints at every number of sessions, with the same sessions for each."""
    num_pages = int(found.num_pages * arguments.pool_share)
    rows = []
    for count in arguments.sessions:
        for name in arguments.hints:
            hints, share, max_s = hints_of(name)
            limits = replace(
                LIMITS,
                num_pages=num_pages,
                evicts_by_session=hints.names,
                protected_share=share,
                max_protected_s=max_s,
            )
            of_seeds = []
            for seed in range(arguments.seeds):
                sessions = agents(count, edits=arguments.edits, seed=seed)
                asked = merge(sessions, others(arguments.others, seed=seed), key=lambda one: one.starts_at)
                how = {"num_replicas": 1, "request_s": found.steps.request_s, "seed": seed}
                make = partial(SimulatedReplica, limits, found.steps, hints=hints)
                seen = simulate("round robin", make, asked, **how)
                of_seeds.append(figures_of_sessions(seen, num_pool_tokens=num_pages * LIMITS.page_size))
            means = {key: float(np.mean([each[key] for each in of_seeds])) for key in of_seeds[0]}
            rows.append({"sessions": count, "hints": name, **means})
            note(f"{count} sessions, {name}: {means}")
    scene = {"edits": arguments.edits, "others": arguments.others, "seeds": arguments.seeds}
    return {**scene, "num_pages": num_pages, "rows": rows}


def main() -> None:
    """Measure hints about sessions."""

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=lambda text: [int(part) for part in names(text)], default="6,20,60,160")
    parser.add_argument("--hints", type=names, default="none,final,ttl:0.5:300,ttl:0.5:30,ttl+final:0.5:30")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--edits", type=float, default=0.1, help="share of turns that edit the history")
    parser.add_argument("--others", type=float, default=4.0, help="chats of one turn per second, without hints")
    parser.add_argument("--pool-share", type=float, default=0.1, help="of the pages that fit")
    parser.set_defaults(data_ranks=1)
    measure_on_slice(parser, run, name="session_hints", machine="hints_machine", table=session_hints)


if __name__ == "__main__":
    main()
