"""Simulate agents' sessions with each feature, at several ratios of their tokens to the pool.

    python -m benchmarks.agent_features [--ratios 0.5,1.1,3.3,10] [--ways arrival cached] [--seed 0]
        [--model qwen3-30b-a3b] [--topology v6e:2x4] [--data-ranks 4] [--out FILE.json]

Sessions are those of `benchmarks.agent_sessions` on a part of the pages, for at most 200 s of simulated time. With one
replica, `arrival` admits requests in order of arrival and `cached` in the product's order; `hints` ends sessions and
asks for TTLs; `host memory` keeps evicted pages. With two replicas behind the router, and twice the sessions, both
replicas of `two` compute prompts and tokens; in `apart` one replica computes long prompts for the other. Rates are per
replica. The result file keeps its rows of other ratios and ways.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from benchmarks.agent_sessions import LOADS, figures, measure_on_slice, ordered, sessions
from benchmarks.conditions import note
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import agent_features
from benchmarks.prefill_apart import LINK_RATE, Beside
from benchmarks.session_hints import hints_of
from benchmarks.simulation.fleet import Seen, simulate
from benchmarks.simulation.replica import HostMemory, SimulatedReplica
from benchmarks.simulation.slices import SliceReplica
from rayserve_moe.scheduling.scheduler import StepLimits

UNTIL_S = 200.0
"""Maximum simulated seconds. Without it, sessions of ten times the pool would take too long to simulate."""
RATIOS = {0.5: (9, 4), 1.1: (20, 4), 3.3: (62, 4), 10.0: (62, 12)}
"""Number of sessions, and the divisor of the pages, by the ratio of the sessions' tokens to the pool."""
HINTS = "ttl+final:0.5:30"
"""Hint policy: the product's defaults for clients that send hints."""
ONE = ("arrival", "cached", "hints", "host memory", "hints and host memory")
TWO = ("two", "two with host memory", "apart")


def play(way: str, ratio: float, *, found: SliceReplica, seed: int) -> tuple[Seen, dict[str, Any]]:
    """Simulate one way at one ratio; return the simulation and the figures of its sessions."""
    count, divisor = RATIOS[ratio]
    limits = replace(LIMITS, num_data_ranks=found.num_data_ranks, num_pages=found.num_pages // divisor)
    hosted = found.host_memory() if "host memory" in way or way == "apart" else None
    num_replicas = 1 if way in ONE else 2
    roots = list(sessions(LOADS["agents"], num_replicas * count, seed=seed))
    make = replica_maker(limits, found, way=way, host=hosted)
    with ordered("arrival") if way == "arrival" else nullcontext():
        if way == "apart":
            page_link_s = found.page_bytes * found.num_devices / found.num_data_ranks / LINK_RATE
            apart = Beside(
                [make(), make()],
                request_s=found.steps.request_s,
                seed=seed,
                page_link_s=page_link_s,
                longest=LIMITS.chunk_tokens,
            )
            seen = apart.run(roots, until_s=UNTIL_S)
        else:
            policy = "round robin" if num_replicas == 1 else "prefix"
            how = {"num_replicas": num_replicas, "request_s": found.steps.request_s, "seed": seed, "until_s": UNTIL_S}
            seen = simulate(policy, make, roots, **how)
    return seen, figures(seen, roots=roots)


def replica_maker(
    limits: StepLimits, found: SliceReplica, *, way: str, host: HostMemory | None
) -> Callable[[], SimulatedReplica]:
    """Return a function that makes a replica. With hints, the replica evicts by them."""
    if "hints" not in way:
        return lambda: SimulatedReplica(limits, found.steps, host=host)
    hints, share, max_s = hints_of(HINTS)
    hinted = replace(limits, evicts_by_session=True, protected_share=share, max_protected_s=max_s)
    return lambda: SimulatedReplica(hinted, found.steps, hints=hints, host=host)


def run(arguments: argparse.Namespace, found: SliceReplica) -> dict[str, Any]:
    """Simulate each way at each ratio, with the same sessions for equal numbers of replicas."""
    rows: dict[tuple[float, str], dict[str, Any]] = {}
    if arguments.out.exists():
        saved = json.loads(arguments.out.read_text(encoding="utf-8"))["agent_features"]["rows"]
        rows = {(row["ratio"], row["way"]): row for row in saved}
    for ratio in arguments.ratios:
        for way in arguments.ways:
            seen, measured = play(way, ratio, found=found, seed=arguments.seed)
            rows[ratio, way] = {"ratio": ratio, "way": way, "requests": len(seen.asked), **measured}
            note(f"{ratio}, {way}: {measured['session_mean_s']:.0f} s each, p99 {measured['ttft_p99_s']:.1f} s")
    in_order = sorted(rows, key=lambda key: (key[0], (*ONE, *TWO).index(key[1])))
    return {"until_s": UNTIL_S, "rows": [rows[key] for key in in_order]}


def main() -> None:
    """Simulate, save, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratios", type=lambda text: [float(part) for part in text.split(",")], default=list(RATIOS))
    parser.add_argument("--ways", nargs="+", choices=[*ONE, *TWO], default=[*ONE, *TWO])
    parser.add_argument("--data-ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    measure_on_slice(parser, run, name="agent_features", machine="agent_features_machine", table=agent_features)


if __name__ == "__main__":
    main()
