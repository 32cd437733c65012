"""Where requests go, on a clock that is computed: round robin, load, and cached prefixes times load.

    python -m benchmarks.fleet_routing [--requests 3000] [--out FILE.json]

Replicas are this package's prefix trees behind a queue of prompts; the router is its own. Conversations have the
shape of Mooncake's published trace: a block of tokens common to all, inputs and answers of log-normal and exponential
lengths, minutes between turns. `whole` is one replica with the cache of all; what the others compute is divided by its.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, save
from benchmarks.fleet_table import fleet_routing
from rayserve_moe.fleet.choosing import Choosing, Prompt
from rayserve_moe.fleet.load_average import Load, LoadAverage, Report
from rayserve_moe.fleet.page_log import PageLog
from rayserve_moe.fleet.prefix_index import PrefixIndex
from rayserve_moe.scheduling.page_digests import prompt_digests
from rayserve_moe.scheduling.page_events import PageEvents
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.prefix_tree import PrefixTree

PAGE_SIZE = 128
KEY = bytes(32)
NAMESPACE = ("",)
SYSTEM_TOKENS = 512
TURNS = 8
BETWEEN_TURNS_S = 90.0
NEW_TOKENS = (1500.0, 1.1)
"""Median and sigma of the tokens that a turn adds."""
ANSWER_TOKENS = 343.0
LONGEST = 100_000
PREFILL_TOKENS_S = 20_000.0
STEP_S, STEP_OF_ROW_S = 0.02, 0.0002
REPORT_S = 0.1
LOAD = 0.7
"""Of the replicas' prompt throughput, were half of all prompt tokens found cached."""
POLICIES = ("round robin", "load", "prefix")
FLEETS = (2, 4, 8, 32)


@dataclass(order=True)
class Turn:
    """A request: it comes at `at` and continues the conversation's tokens."""

    at: float
    conversation: int
    token_ids: np.ndarray = field(compare=False)
    num_answer: int = field(compare=False)


class Replica:
    """A prefix tree, a queue of prompts computed one after the other, and answers that share steps."""

    def __init__(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages + 1)
        self.tree = PrefixTree(self.allocator, page_size=PAGE_SIZE)
        self.events = PageEvents(lambda: None)
        self.tree.watch(partial(self.events.record, 0))
        self.log = PageLog(KEY, num_data_ranks=1, num_pages=num_pages + 1, page_size=PAGE_SIZE)
        self.queue: deque[Turn] = deque()
        self.free_at = 0.0
        self.ends: list[float] = []
        self.num_computed = 0
        self.average = LoadAverage(0.0)

    def load(self, now: float) -> Load:
        while self.ends and self.ends[0] <= now:
            heappop(self.ends)
        return Load(len(self.ends), int(max(0.0, self.free_at - now) * PREFILL_TOKENS_S))

    def serve(self, turn: Turn) -> float:
        """Compute a prompt after those before it; returns the time of its first token."""
        load = self.load(turn.at)
        prefix = self.tree.match(NAMESPACE, turn.token_ids[:-1])
        new = len(turn.token_ids) - prefix.num_pages * PAGE_SIZE
        self.num_computed += new
        self.free_at = max(self.free_at, turn.at) + new / PREFILL_TOKENS_S
        self._cache(turn.token_ids)
        heappush(self.ends, self.free_at + turn.num_answer * (STEP_S + STEP_OF_ROW_S * load.num_choices))
        return self.free_at

    def _cache(self, token_ids: np.ndarray) -> None:
        num_pages = len(token_ids) // PAGE_SIZE
        token_ids = token_ids[: num_pages * PAGE_SIZE]
        prefix = self.tree.match(NAMESPACE, token_ids)
        self.tree.lock(prefix)
        missing = num_pages - prefix.num_pages
        if (short := missing - self.allocator.num_free) > 0:
            self.tree.evict(short)
        taken = min(missing, self.allocator.num_free)
        pages = self.allocator.allocate(taken)
        assert pages is not None, "pages were evicted"
        held = np.concatenate([prefix.page_ids, pages])
        self.tree.insert(NAMESPACE, token_ids[: len(held) * PAGE_SIZE], page_ids=held)
        self.allocator.release(pages)
        self.tree.unlock(prefix)


def conversations(num_requests: int, *, rate: float, seed: int) -> Iterator[Turn]:
    """Return turns in order of time, of conversations that begin at `rate` / TURNS a second."""
    draw = np.random.default_rng(seed)
    system = draw.integers(0, 1 << 30, SYSTEM_TOKENS, dtype=np.int32)
    turns: list[Turn] = []
    at, median, sigma = 0.0, *NEW_TOKENS
    for conversation in range(num_requests // TURNS):
        at += draw.exponential(TURNS / rate)
        then, token_ids = at, system
        for _ in range(TURNS):
            new = int(draw.lognormal(np.log(median), sigma)) + 1
            answer = int(draw.exponential(ANSWER_TOKENS)) + 1
            token_ids = np.append(token_ids, draw.integers(0, 1 << 30, new, dtype=np.int32))
            if len(token_ids) > LONGEST:
                break
            turns.append(Turn(then, conversation, token_ids, answer))
            token_ids = np.append(token_ids, draw.integers(0, 1 << 30, answer, dtype=np.int32))
            then += answer * STEP_S * 1.5 + draw.exponential(BETWEEN_TURNS_S)
    yield from sorted(turns)


def run(policy: str, turns: list[Turn], *, num_replicas: int, total_pages: int, seed: int) -> dict[str, float]:
    """Send all turns to a fleet; returns tokens computed, times to the first token, and how even the work was."""
    replicas = {str(n): Replica(total_pages // num_replicas) for n in range(num_replicas)}
    names, index, now = list(replicas), PrefixIndex(), [0.0]
    index.follow(names)
    choosing = Choosing(index, draw=random.Random(seed), clock=lambda: now[0])
    times, reported_at = [], -REPORT_S
    for name, replica in replicas.items():
        for part in replica.log.snapshot():
            index.apply(name, part)
    for place, turn in enumerate(turns):
        now[0] = turn.at
        if turn.at >= reported_at + REPORT_S:
            reported_at = turn.at
            for name, replica in replicas.items():
                choosing.report(name, Report(replica.average.add(replica.load(turn.at), turn.at)))
        chosen = names[place % len(names)]
        if policy != "round robin":
            digests = (
                prompt_digests(KEY, "", token_ids=turn.token_ids, page_size=PAGE_SIZE) if policy == "prefix" else []
            )
            chosen = choosing.choose(Prompt(len(turn.token_ids), digests, PAGE_SIZE), names)
        replica = replicas[chosen]
        times.append(replica.serve(turn) - turn.at)
        index.apply(chosen, replica.log.publish(replica.events.take(1 << 18)))
    work = [replica.num_computed for replica in replicas.values()]
    cuts = statistics.quantiles(times, n=100)
    return {
        "computed": sum(work),
        "ttft_p50_s": cuts[49],
        "ttft_p99_s": cuts[98],
        "busiest": max(work) / statistics.mean(work),
    }


def measure(num_requests: int) -> dict[str, Any]:
    """Measure all policies on all fleets; every policy gets the same turns."""
    rows = []
    for num_replicas in FLEETS:
        per_turn = (TURNS + 1) / 2 * NEW_TOKENS[0] * np.exp(NEW_TOKENS[1] ** 2 / 2)
        rate = LOAD * num_replicas * PREFILL_TOKENS_S / (0.5 * per_turn)
        count = num_requests * max(1, num_replicas // 4)
        turns = list(conversations(count, rate=rate, seed=num_replicas))
        # A quarter of what live conversations hold fits: caches are as short of pages as in the published runs.
        live = rate * (BETWEEN_TURNS_S + ANSWER_TOKENS * STEP_S) * per_turn / PAGE_SIZE
        total_pages = int(live)
        whole = run("whole", turns, num_replicas=1, total_pages=total_pages, seed=0)
        for policy in POLICIES:
            found = run(policy, turns, num_replicas=num_replicas, total_pages=total_pages, seed=0)
            row = {"num_replicas": num_replicas, "policy": policy, "recomputed": found["computed"] / whole["computed"]}
            rows.append({**row, **found, "given": sum(len(turn.token_ids) for turn in turns)})
            print(rows[-1], flush=True)
    return {"num_requests": num_requests, "page_size": PAGE_SIZE, "rows": rows}


def main() -> None:
    """Run all, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet_routing.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    measured = measure(arguments.requests)
    save({"fleet_machine": machine_facts(load_before), "fleet_routing": measured}, arguments.out)
    print(fleet_routing(measured))


if __name__ == "__main__":
    main()
