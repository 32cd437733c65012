"""Agents' sessions without and with evicted pages in host memory, at ratios of their tokens to the pool.

    python -m benchmarks.host_pages [--ratios 0.5,1.1,3.3,10] [--seed 0] [--model qwen3-30b-a3b]
        [--topology v6e:2x4] [--data-ranks 4] [--out FILE.json]

Simulated time, with the sessions of `benchmarks.agent_sessions` on one replica, for at most 300 s. On each chip one
copy follows the other.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.agent_sessions import LOADS, figures, measure_on_slice, sessions
from benchmarks.conditions import note
from benchmarks.fleet_simulation import LIMITS
from benchmarks.fleet_table import host_pages
from benchmarks.simulation.fleet import simulate
from benchmarks.simulation.replica import HostMemory, SimulatedReplica
from benchmarks.simulation.slices import SliceReplica

HOST_BYTES = 512 << 30
"""Bytes for pages, of the 1,536 GiB that a host of v6e has (docs.cloud.google.com/tpu/docs/v6e)."""
COPY_RATES = (10e9,)
"""Bytes per second between a chip and host memory. The link of a v6e is PCIe Gen5 (same page): 31.5e9 by 8 lanes, which
is more than a thread copies."""
UNTIL_S = 300.0
"""Maximum simulated seconds: at ten times the pool, sessions would otherwise take too long to simulate."""
RATIOS = {0.5: (9, 4), 1.1: (20, 4), 3.3: (62, 4), 10.0: (62, 12)}
"""Number of sessions, and the divisor of the pages, by the ratio of the sessions' tokens to the pool."""


def run(arguments: argparse.Namespace, found: SliceReplica) -> dict[str, Any]:
    """Simulate the same sessions of each ratio without host memory and with it, at each rate."""
    num_hosted = int(HOST_BYTES / (found.page_bytes * found.num_devices))
    rates = {f"{rate / 1e9:g} GB/s": HostMemory(num_hosted, found.page_bytes / rate) for rate in COPY_RATES}
    rows = []
    for ratio in arguments.ratios:
        count, divisor = RATIOS[ratio]
        limits = replace(LIMITS, num_data_ranks=found.num_data_ranks, num_pages=found.num_pages // divisor)
        roots = list(sessions(LOADS["agents"], count, seed=arguments.seed))
        for name, host in {"none": None, **rates}.items():
            replica = SimulatedReplica(limits, found.steps, host=host)
            how = {"num_replicas": 1, "request_s": found.steps.request_s, "seed": arguments.seed, "until_s": UNTIL_S}
            seen = simulate("round robin", lambda replica=replica: replica, roots, **how)
            counts = {key: value for key, value in replica.cycle.statistics().items() if key.startswith("host_pages")}
            rows.append({"ratio": ratio, "sessions": count, "copies": name, **figures(seen, roots=roots), **counts})
            note(f"{ratio}, {name}: {rows[-1]['session_mean_s']:.0f} s each")
    return {"num_hosted": num_hosted, "rows": rows}


def main() -> None:
    """Measure pages in host memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratios", type=lambda text: [float(part) for part in text.split(",")], default=list(RATIOS))
    parser.add_argument("--data-ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    measure_on_slice(parser, run, name="host_pages", machine="host_pages_machine", table=host_pages)


if __name__ == "__main__":
    main()
