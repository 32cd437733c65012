"""Take a host of four away and give it back, under requests and with expert balancing on: pauses, balance, answers.

    python -m benchmarks.elastic_hosts [--rounds 2] [--after 5] [--out FILE.json]

Emulated hosts on raylets of their own; the replica is in this process. In the first round the smaller group compiles
its programs, later ones find them. A pause is the longest time without an update less `--after`, for which the group
waits for the host. Balance is the hottest rank by the loads in the window, over the least that any placement has.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.kill_nodes import LIMIT_S, NUM_CPUS, Answer, answers, differing
from benchmarks.markdown import markdown_table
from rayserve_moe.balancing.first_placement import lower_bound
from rayserve_moe.balancing.planning import rank_loads
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import set_environment_defaults, settings_from
from rayserve_moe.serving.start.environment import DEFAULTS

NUM_HOSTS = 4
EPLB = {"enable_eplb": True, "eplb_interval": 64, "eplb_window": 256, "num_redundant_experts": 4}


def until_hosts(
    engine: ReplicaEngine, num_missing: int, fault: Callable[[], object]
) -> tuple[list[list[Answer | str]], float]:
    """Answer requests while hosts go or come; returns all answers, and the longest time without an update."""
    found, gaps, deadline = [], [], time.monotonic() + LIMIT_S
    while engine.loop.statistics()["hosts_missing"] != num_missing or len(found) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num_missing} hosts are not missing")
        answered, gap_s = answers(engine, fault=None if found else fault)
        found.append(answered)
        gaps.append(gap_s)
    return found, max(gaps)


def balanced(engine: ReplicaEngine) -> tuple[list[list[Answer | str]], dict[str, float]]:
    """Answer requests until a plan has been followed; returns all answers, and how good the placement is."""
    found, control, deadline = [], engine.loop.eplb_control, time.monotonic() + LIMIT_S
    finished = control.history.totals["finished"]
    while control.history.totals["finished"] == finished and time.monotonic() < deadline:
        found.append(answers(engine)[0])
    view, placement = control.view(), engine.loop.eplb.migration.placement
    tokens, num_redundant = np.asarray(view.tokens), placement.num_slots - placement.num_experts
    bound = lower_bound(tokens, ep_size=placement.ep_size, num_redundant=num_redundant)
    over = rank_loads(placement, tokens).max(axis=1) / bound
    moved = view.history[-1].moved_slots if view.history else 0
    return found, {"over_bound": float(over.mean()), "moved_slots": moved, "ranks": placement.ep_size}


def rounds(cluster: Cluster, engine: ReplicaEngine, *, num_rounds: int) -> list[dict[str, Any]]:
    """Shrink and grow; returns a row for each change."""
    answers(engine)
    expected, _ = answers(engine)
    changes = []
    for number in range(num_rounds):
        node = random.choice(list(cluster.worker_nodes))
        for name, num_missing, fault in (
            ("shrink", 1, lambda node=node: cluster.remove_node(node, allow_graceful=False)),
            ("grow", 0, lambda: cluster.add_node(num_cpus=NUM_CPUS)),
        ):
            phases = dict(engine.loop.recovery.phase_seconds)
            found, gap_s = until_hosts(engine, num_missing, fault)
            took = {key: value - phases.get(key, 0.0) for key, value in engine.loop.recovery.phase_seconds.items()}
            more, balance = balanced(engine)
            counts = [differing(each, expected) for each in (*found, *more)]
            sums = {key: sum(int(each[key]) for each in counts) for key in ("lost", "tokens", "rows")}
            gap = max(each["logprob_gap"] for each in counts)
            note(f"{name}: {gap_s:.2f} s without tokens, {took}, {sums}, {balance}")
            requests = sum(map(len, (*found, *more)))
            changes.append(
                {"change": f"{name} {number + 1}", "outage_s": gap_s, "phases": took, "requests": requests, **sums}
                | {"logprob_gap": gap, **balance}
            )
    return changes


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--after", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "elastic_hosts.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    set_environment_defaults({name: value for name, value in DEFAULTS.items() if name.startswith("RAY_health")})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(NUM_HOSTS):
        cluster.add_node(num_cpus=NUM_CPUS)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    values = {"max_model_len": 256, "max_running_requests": 12, "precompile_bs_paddings": [12], "max_step_tokens": 64}
    hosts = {"num_hosts": NUM_HOSTS, "data_parallel_size": NUM_HOSTS, "cpus_per_host": NUM_CPUS, **EPLB}
    elastic = {"elastic_after_s": arguments.after, "enable_return_routed_experts": True}
    bounds = {"most_rebuilds_in_10_minutes": 1000, "most_rebuilds_in_hour": 1000}
    with tempfile.TemporaryDirectory() as programs:
        chosen = {"model_path": str(checkpoint_of("tiny")), "compile_cache": programs, "structured_output": False}
        engine = start_replica_engine(settings_from({**chosen, **values, **hosts, **elastic, **bounds}))
        try:
            found = rounds(cluster, engine, num_rounds=arguments.rounds)
        finally:
            engine.shutdown()
            ray.shutdown()
            cluster.shutdown()
    save({"machine": machine_facts(load_before), "after_s": arguments.after, "rows": found}, arguments.out)
    print(table_of(found, after_s=arguments.after))


def table_of(rows: list[dict[str, Any]], *, after_s: float) -> str:
    """The changes as Markdown."""
    headings = ["change", "pause, s", "of it compiling, s", "requests", "lost", "tokens", "rows", "log-prob gap"]
    lines = [
        [
            row["change"],
            f"{row['outage_s'] - (after_s if row['change'].startswith('shrink') else 0.0):.1f}",
            f"{row['phases'].get('compiling', 0.0):.1f}",
            *(str(row[column]) for column in ("requests", "lost", "tokens", "rows")),
            f"{row['logprob_gap']:.0e}",
            f"{row['over_bound']:.3f}",
            str(row["moved_slots"]),
        ]
        for row in rows
    ]
    return markdown_table([*headings, "hottest rank / bound", "slots moved"], lines)


if __name__ == "__main__":
    main()
