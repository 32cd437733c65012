"""Fleets of 1 to 1,000 replicas before there is one: goodput, times and cache hits by policy, on a computed clock.

    python -m benchmarks.fleet_simulation [--shape agents | --trace FILE] [--replicas 1,4,16] [--rates 1,2,3]
        [--model qwen3-30b-a3b --topology v6e:2x4 --data-ranks 4 | --times FILE.json] [--out FILE.json]

Scheduler, prefix trees, page events, index and router are the product's. Steps take what `plan-slice` estimates for a
TPU slice, or what `python -m benchmarks.fleet_validation` has measured. A request is good where its first token comes
within `--ttft` seconds and its others within `--tpot` on average; those of the first half warm the caches. A thousand
replicas take 4 GB with NUMPY_MADVISE_HUGEPAGE=0, and 8 to 18 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.fleet_table import fleet_simulation
from benchmarks.simulation.costs import MeasuredSteps, StepTimes
from benchmarks.simulation.fleet import POLICIES, simulate
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.slices import slice_replica
from benchmarks.simulation.workloads import SHAPES, Conversation, drawn, traced
from rayserve_moe.scheduling.scheduler import StepLimits

LIMITS = StepLimits(num_rows=32, step_tokens=1024, chunk_tokens=1024, page_size=128, num_pages=4096, max_tokens=33_024)
"""Of a data rank."""


def workload(arguments: argparse.Namespace, *, rate: float, num_replicas: int) -> Iterable[Conversation]:
    """Return conversations at `rate` requests per second and replica; a trace is played as many times as fast."""
    if arguments.trace:
        return traced(arguments.trace, longest=LIMITS.max_tokens - 1, speed=rate * num_replicas)
    count = math.ceil(arguments.seconds * rate * num_replicas)
    return drawn(SHAPES[arguments.shape], rate=rate * num_replicas, num_requests=count, seed=arguments.seed)


def replica_of(arguments: argparse.Namespace) -> tuple[StepTimes, StepLimits]:
    """Step times of a replica and the limits of its scheduler."""
    if arguments.times:
        return MeasuredSteps.read(arguments.times), replace(LIMITS, num_pages=arguments.pages or LIMITS.num_pages)
    sizes = {"page_size": LIMITS.page_size, "longest": LIMITS.max_tokens - 1}
    found = slice_replica(arguments.model, arguments.topology, num_data_ranks=arguments.data_ranks, **sizes)
    pages = arguments.pages or found.num_pages
    return found.steps, replace(LIMITS, num_data_ranks=found.num_data_ranks, num_pages=pages)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate every policy at every number of replicas and rate, all with the same conversations."""
    times, limits = replica_of(arguments)
    rows = []
    for num_replicas in arguments.replicas:
        for rate in arguments.rates:
            for policy in arguments.policies:
                began = time.perf_counter()
                conversations = workload(arguments, rate=rate, num_replicas=num_replicas)
                how = {"num_replicas": num_replicas, "request_s": times.request_s, "seed": arguments.seed}
                seen = simulate(policy, lambda: SimulatedReplica(limits, times), conversations, **how)
                figures = seen.steady().figures(ttft_s=arguments.ttft, tpot_s=arguments.tpot)
                asked = {"num_replicas": num_replicas, "rate": rate, "policy": policy, "seconds": seen.last_start_s}
                rows.append({**asked, **figures, "wall_s": time.perf_counter() - began})
                note(
                    f"{num_replicas} x {rate}/s, {policy}: {figures['good_share']:.3f} good, {rows[-1]['wall_s']:.0f} s"
                )
    replica = f"steps of {arguments.times}" if arguments.times else f"{arguments.model} on {arguments.topology}"
    bounds = {"ttft_s": arguments.ttft, "tpot_s": arguments.tpot}
    asked = str(arguments.trace.name) if arguments.trace else arguments.shape
    pages = {"num_pages": limits.num_pages * limits.num_data_ranks, "page_size": limits.page_size}
    return {"replica": replica, "asked": asked, **bounds, **pages, "rows": rows}


def merged(known: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of both results, replaced by new ones; only the new rows if something else was simulated."""
    if {**known, "rows": ()} != {**new, "rows": ()}:
        return new["rows"]
    rows = {
        (row["num_replicas"], row["rate"], POLICIES.index(row["policy"])): row for row in known["rows"] + new["rows"]
    }
    return [rows[place] for place in sorted(rows)]


def options() -> argparse.ArgumentParser:
    """Return the options of the command."""

    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="agents")
    parser.add_argument("--trace", type=Path, help="Mooncake's .jsonl or Azure's .csv, in place of a shape")
    parser.add_argument("--replicas", type=lambda text: [int(part) for part in text.split(",")], default=[4])
    parser.add_argument("--rates", type=numbers, default=[2.0], help="requests per second and replica")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=120.0, help="in which conversations begin; not of a trace")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--data-ranks", type=int, default=4)
    parser.add_argument("--times", type=Path, help="measured step times, in place of a slice")
    parser.add_argument("--pages", type=int, default=0, help="of a data rank; 0: what fits")
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet_simulation.json")
    return parser


def main() -> None:
    """Simulate, write the result file, print its table."""
    arguments = options().parse_args()
    load_before = load_before_start()
    simulated = run(arguments)
    if arguments.out.exists():
        simulated["rows"] = merged(json.loads(arguments.out.read_text())["fleet_simulation"], simulated)
    save({"simulation_machine": machine_facts(load_before), "fleet_simulation": simulated}, arguments.out)
    print(fleet_simulation(simulated))


if __name__ == "__main__":
    main()
