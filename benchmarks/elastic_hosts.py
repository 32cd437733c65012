"""Take a host of four away and give it back, under requests and with expert balancing on: pauses, balance, answers.

    python -m benchmarks.elastic_hosts [--rounds 2] [--after 5] [--programs FOLDER] [--out FILE.json]

Emulated hosts on raylets of their own; the replica is in this process. In the first round the smaller group compiles
its programs, later ones find them. A pause is the longest time without an update less `--after`, for which the group
waits for the host. After the planner's next decision, the load of the hottest rank is divided by the lower bound of all
placements. Moved bytes count experts that are new to the node of a host, and experts that plans move. A host reads
other experts again from the disk or page cache of its node. Minimum bytes count the slots of the same placement that no
remaining host had, whichever rank it becomes.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from scipy.optimize import linear_sum_assignment

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.kill_nodes import LIMIT_S, NUM_CPUS, Answer, answers, differing
from benchmarks.markdown import markdown_table
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.planner import lower_bound
from rayserve_moe.balancing.planning import rank_loads
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import set_environment_defaults, settings_from
from rayserve_moe.engine.eplb.control import UNDER_WAY, MigrationRecord
from rayserve_moe.serving.start.command import DEFAULTS

NUM_HOSTS, NUM_TOKENS = 4, 40
START_S = 3600.0
"""Time limit of a start. Four workers compile side by side, which takes over ten minutes on a busy machine."""
SETTLED_S = 1.0
"""Seconds between a decision and the check for its plan, which is recorded a moment later."""
EPLB = {"enable_eplb": True, "eplb_interval": 256, "eplb_window": 512, "num_redundant_experts": 4}
OF_RAY = ("RAY_health", "RAY_worker")
"""Prefixes of Ray's settings that take a server's defaults. By Ray's own default other processes go first (nice 15)."""
ask = partial(answers, num_tokens=NUM_TOKENS)


def until_hosts(
    engine: ReplicaEngine, num_missing: int, fault: Callable[[], object]
) -> tuple[list[list[Answer | str]], float]:
    """Answer requests while hosts go or come; returns all answers, and the longest time without an update."""
    found, gaps, deadline = [], [], time.monotonic() + 2 * LIMIT_S
    while engine.loop.statistics()["hosts_missing"] != num_missing or len(found) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num_missing} hosts are not missing")
        answered, gap_s = ask(engine, fault=None if found else fault)
        found.append(answered)
        gaps.append(gap_s)
    return found, max(gaps)


class PlanWatch:
    """Waits for the planner's next decision; measures the experts that it moves, and the balance."""

    def __init__(self, engine: ReplicaEngine) -> None:
        self._loop, self._control = engine.loop, engine.loop.eplb_control
        self.begin()

    def begin(self) -> None:
        """Forget earlier decisions."""
        self._since = time.time()

    @property
    def is_over(self) -> bool:
        """Return True if the planner has decided since `begin`, perhaps against a plan, and no experts are moving."""
        age_s = self._control.view().actor.plan_age_s
        is_decided = age_s is not None and SETTLED_S <= age_s < time.time() - self._since
        return is_decided and all(plan.outcome != UNDER_WAY for plan in self._plans())

    @property
    def num_plans(self) -> int:
        """Return the number of plans since `begin`."""
        return len(self._plans())

    @property
    def moved_slots(self) -> int:
        """Return the number of slots that these plans moved."""
        return sum(plan.moved_slots for plan in self._plans())

    def over_bound(self) -> float:
        """Return the load of the hottest rank over the lower bound of all placements, mean over layers."""
        tokens, placement = np.asarray(self._control.view().tokens), self._loop.eplb.migration.placement
        num_redundant = placement.num_slots - placement.num_experts
        bound = lower_bound(tokens, ep_size=placement.ep_size, num_redundant=num_redundant)
        return float((rank_loads(placement, tokens).max(axis=1) / bound).mean())

    def _plans(self) -> list[MigrationRecord]:
        return [plan for plan in self._control.history.records() if plan.time >= self._since]


def balanced(engine: ReplicaEngine, watch: PlanWatch) -> list[list[Answer | str]]:
    """Answer requests until the planner has decided and its plan is finished; returns all answers."""
    found, deadline = [], time.monotonic() + 2 * LIMIT_S
    watch.begin()
    while not watch.is_over:
        if time.monotonic() > deadline:
            raise TimeoutError("the planner has not decided")
        found.append(ask(engine)[0])
    return found


def min_slots(before: ExpertPlacement, after: ExpertPlacement, *, stay: list[int]) -> int:
    """Return the minimum number of slots of `after` to fill if the ranks `stay` of `before` become ranks of `after`."""
    had, wanted = (each.expert_of_slot.reshape(each.num_layers, each.ep_size, -1) for each in (before, after))
    is_there = (wanted[:, :, None, :, None] == had[:, None, stay, None, :]).any(axis=-1)
    kept = is_there.sum(axis=(0, 3))
    return after.expert_of_slot.size - int(kept[linear_sum_assignment(kept, maximize=True)].sum())


class NodeExperts:
    """Experts that the nodes have loaded, by layer."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def load(self, placement: ExpertPlacement, nodes: list[str]) -> int:
        """Record the experts that each rank's host loads; return the number of experts that are new to their node."""
        slots = placement.expert_of_slot.reshape(placement.num_layers, placement.ep_size, -1).swapaxes(0, 1)
        layers, num_new = np.arange(placement.num_layers)[:, None], 0
        for node, experts in zip(nodes, slots, strict=True):
            nothing = np.zeros((placement.num_layers, placement.num_experts), np.bool_)
            held = self._held.setdefault(node, nothing)
            num_new += int(np.count_nonzero(~held[layers, experts]))
            held[layers, experts] = True
        return num_new


def nodes_of(engine: ReplicaEngine) -> list[str]:
    """Return the node of each host."""
    return [host.node_id for host in ray.get([worker.process.remote() for worker in engine.executor.workers])]


def moved(
    engine: ReplicaEngine, watch: PlanWatch, before: ExpertPlacement, *, stay: list[int], loaded: int, slot_bytes: int
) -> dict[str, int]:
    """Return bytes of experts moved by a change and the plans after it, and the minimum for the current placement."""
    after = engine.loop.eplb.migration.placement
    slots = loaded + watch.moved_slots
    least = min_slots(before, after, stay=stay)
    return {"moved_bytes": slots * slot_bytes, "planned_bytes": watch.moved_slots * slot_bytes} | {
        "least_bytes": least * slot_bytes,
        "ranks": after.ep_size,
    }


def slot_bytes_of(path: Path, *, itemsize: int) -> int:
    """Return bytes of an expert of one layer."""
    tensors = open_checkpoint(path).tensors
    return itemsize * sum(math.prod(each.shape) for name, each in tensors.items() if ".layers.0.mlp.experts.0." in name)


def rounds(cluster: Cluster, engine: ReplicaEngine, *, num_rounds: int, slot_bytes: int) -> list[dict[str, Any]]:
    """Shrink and grow; returns a row for each change."""
    ask(engine)
    expected, _ = ask(engine)
    watch, changes, held = PlanWatch(engine), [], NodeExperts()
    held.load(engine.loop.eplb.first, nodes_of(engine))
    balanced(engine, watch)
    for number in range(num_rounds):
        node = random.choice(list(cluster.worker_nodes))
        for name, num_missing, fault in (
            ("shrink", 1, lambda node=node: cluster.remove_node(node, allow_graceful=False)),
            ("grow", 0, lambda: cluster.add_node(num_cpus=NUM_CPUS)),
        ):
            before, phases = engine.loop.eplb.migration.placement, dict(engine.loop.recovery.phase_seconds)
            nodes = nodes_of(engine)
            stay = [rank for rank, each in enumerate(nodes) if num_missing == 0 or each != node.node_id]
            found, gap_s = until_hosts(engine, num_missing, fault)
            loaded = held.load(engine.loop.eplb.first, nodes_of(engine))
            took = {key: value - phases.get(key, 0.0) for key, value in engine.loop.recovery.phase_seconds.items()}
            note(f"{name}: {gap_s:.2f} s without tokens, {took}")
            more = balanced(engine, watch)
            counts = [differing(each, expected) for each in (*found, *more)]
            sums = {key: sum(int(each[key]) for each in counts) for key in ("lost", "tokens", "rows")}
            sums |= {"over_bound": watch.over_bound(), "plans": watch.num_plans}
            sums |= moved(engine, watch, before, stay=stay, loaded=loaded, slot_bytes=slot_bytes)
            note(f"{name}: {sums}")
            gap, requests = max(each["logprob_gap"] for each in counts), sum(map(len, (*found, *more)))
            row = {"change": f"{name} {number + 1}", "outage_s": gap_s, "phases": took, "requests": requests}
            changes.append({**row, **sums, "logprob_gap": gap})
    return changes


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--after", type=float, default=5.0)
    parser.add_argument("--programs", help="where programs are kept; nowhere before the start, unless it is given")
    parser.add_argument("--out", type=Path, default=RESULTS / "elastic_hosts.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    set_environment_defaults({name: value for name, value in DEFAULTS.items() if name.startswith(OF_RAY)})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(NUM_HOSTS):
        cluster.add_node(num_cpus=NUM_CPUS)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    values = {"max_model_len": 256, "max_running_requests": 48, "precompile_bs_paddings": [48], "max_step_tokens": 128}
    hosts = {"num_hosts": NUM_HOSTS, "data_parallel_size": NUM_HOSTS, "cpus_per_host": NUM_CPUS, **EPLB}
    elastic = {"elastic_after_s": arguments.after, "enable_return_routed_experts": True}
    bounds = {"max_rebuilds_in_10_minutes": 1000, "max_rebuilds_in_hour": 1000, "start_timeout_s": START_S}
    path = checkpoint_of("tiny")
    with tempfile.TemporaryDirectory() as folder:
        programs = arguments.programs or folder
        chosen = {"model_path": str(path), "compile_cache": programs, "structured_output": False, "dtype": "float32"}
        engine = start_replica_engine(settings_from({**chosen, **values, **hosts, **elastic, **bounds}))
        try:
            slot_bytes = slot_bytes_of(path, itemsize=4)
            found = rounds(cluster, engine, num_rounds=arguments.rounds, slot_bytes=slot_bytes)
        finally:
            engine.shutdown()
            ray.shutdown()
            cluster.shutdown()
    save({"machine": machine_facts(load_before), "after_s": arguments.after, "rows": found}, arguments.out)
    print(table_of(found, after_s=arguments.after))


def table_of(rows: list[dict[str, Any]], *, after_s: float) -> str:
    """Return the changes as Markdown."""
    headings = ["change", "pause, s", "of it compiling, s", "requests", "lost", "tokens", "rows", "log-prob gap"]
    lines = [
        [
            row["change"],
            f"{row['outage_s'] - (after_s if row['change'].startswith('shrink') else 0.0):.1f}",
            f"{row['phases'].get('compiling', 0.0):.1f}",
            *(str(row[column]) for column in ("requests", "lost", "tokens", "rows")),
            f"{row['logprob_gap']:.0e}",
            f"{row['over_bound']:.3f}",
            *(f"{row[column] / 1e6:.2f}" for column in ("moved_bytes", "planned_bytes", "least_bytes")),
        ]
        for row in rows
    ]
    return markdown_table([*headings, "hottest rank / bound", "MB of experts moved", "by the plan", "the least"], lines)


if __name__ == "__main__":
    main()
