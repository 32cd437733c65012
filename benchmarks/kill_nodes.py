"""Kill raylets of hosts, or keepers of weights that were sent, at random moments under requests that must not notice.

    python -m benchmarks.kill_nodes [--faults raylet keeper] [--repeats 10] [--out FILE.json]

Two hosts on raylets of their own, with a spare one standing; the replica is in this process. After a keeper a worker is
killed too, which others replace from what the next keeper has. The longest time without an update is the outage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from safetensors.numpy import load_file

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.kill_table import NUM_PLAIN, NUM_STREAMS
from benchmarks.markdown import markdown_table
from rayserve_moe.checkpoints.bucket import SentBucket, SentTensor
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import set_environment_defaults, settings_from
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.engine.updates.tensors import BucketOrder
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.start.command import DEFAULTS

NUM_CPUS = 3
"""Of the nodes that hold hosts, and more than the head has."""
NUM_TOKENS, PROMPT_TOKENS = 100, 20
LIMIT_S, POLL_S = 300.0, 0.05
SETTLE_S = 10.0
"""After a fault that came late: it is noticed, and got over, by then."""
Answer = tuple[list[int], list[float], list[Any]]


def answers(
    engine: ReplicaEngine,
    *,
    fault: Callable[[], object] | None = None,
    after_s: float = 0.0,
    num_tokens: int = NUM_TOKENS,
) -> tuple[list[Answer | str], float]:
    """Return tokens, log-probs and rows of every request, or its error; and the longest time without an update."""
    count, arrivals, all_ended = NUM_STREAMS + NUM_PLAIN, [time.monotonic()], threading.Event()
    results = {f"r{number}": ChoiceResult() for number in range(count)}

    def receive(updates: list[ChoiceResult]) -> None:
        arrivals.append(time.monotonic())
        for update in updates:
            results[update.request_id].add(update)
        if all(result.finish is not None for result in results.values()):
            all_ended.set()

    prompts = np.random.default_rng(0).integers(5, 200, (count, PROMPT_TOKENS), np.int32)
    for number, (name, prompt) in enumerate(zip(results, prompts, strict=True)):
        sampling = SamplingParams(max_new_tokens=num_tokens, seed=number, ignore_eos=True)
        is_stream = number < NUM_STREAMS
        request = GenerationRequest(name, prompt, sampling, incremental=is_stream, return_routed_experts=True)
        engine.loop.submit(request, receive)
    if fault is not None:
        time.sleep(after_s)
        fault()
    if not all_ended.wait(LIMIT_S):
        raise TimeoutError("requests hang")
    return [_said(result) for result in results.values()], float(np.diff(arrivals).max())


def _said(result: ChoiceResult) -> Answer | str:
    if result.finish is None or result.finish.kind != "length" or result.routing is None:
        return "lost"
    return result.token_ids, result.logprobs, result.routing.rows.tolist()


def differing(found: list[Answer | str], expected: list[Answer | str]) -> dict[str, float]:
    """Return how many requests were lost, how many others differ in tokens or rows, and the largest log-prob gap."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if not isinstance(a, str) and not isinstance(b, str)]
    same = [(a[1], b[1]) for a, b in pairs if a[0] == b[0]]
    return {
        "lost": len(found) - len(pairs),
        "tokens": len(pairs) - len(same),
        "rows": sum(a[2] != b[2] for a, b in pairs),
        "logprob_gap": max((float(np.abs(np.subtract(a, b)).max()) for a, b in same), default=0.0),
    }


def kill_raylet(cluster: Cluster, engine: ReplicaEngine) -> Callable[[], None]:
    """Kill the raylet of a random host, and add a node that may be the next spare one."""
    used = {each.node_id for each in ray.get([worker.process.remote() for worker in engine.executor.workers])}
    node = random.choice([each for each in cluster.worker_nodes if each.node_id in used])

    def kill() -> None:
        cluster.remove_node(node, allow_graceful=False)

    return kill


def kill_keeper(_: Cluster, engine: ReplicaEngine) -> Callable[[], None]:
    """Kill a random keeper, and when another has taken over a random worker."""
    sources = engine.executor.sources
    kept, victims = sources.serving.kept, ray.get([worker.process.remote() for worker in engine.executor.workers])

    def kill() -> None:
        os.kill(random.choice(kept).pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while sources.serving.kept == kept:
            if time.monotonic() > deadline:
                raise TimeoutError("no other keeper")
            time.sleep(POLL_S)
        os.kill(random.choice(victims).pid, signal.SIGKILL)

    return kill


FAULTS = {"raylet": kill_raylet, "keeper": kill_keeper}


def send_weights(engine: ReplicaEngine, path: Path, *, update_id: str = "sent") -> None:
    """Send a checkpoint, as a trainer does: then no disk counts as having it. Every update has an id of its own."""
    tensors = tuple(SentTensor(name, values) for name, values in load_file(path / "model.safetensors").items())
    order = BucketOrder(update_id, WeightOrder("", "0"), 0, is_last=True)
    outcome = engine.loop.control.tensors.stage(SentBucket(tensors), order).result(LIMIT_S)
    if not outcome.success:
        raise RuntimeError(outcome.message)


def repeat(cluster: Cluster, engine: ReplicaEngine, name: str, *, repeats: int) -> dict[str, Any]:
    """Deliver a fault over and over; return sums, the largest gap of log-probs and the outages."""
    answers(engine)
    begun = time.monotonic()
    expected, _ = answers(engine)
    run_s = time.monotonic() - begun
    sums, largest, gaps = dict.fromkeys(("lost", "tokens", "rows"), 0), 0.0, []
    while len(gaps) < repeats:
        cluster.wait_for_nodes()
        before = engine.loop.statistics()["rebuilds"]
        fault, after_s = FAULTS[name](cluster, engine), random.uniform(0, 0.8 * run_s)
        found, gap_s = answers(engine, fault=fault, after_s=after_s)
        counts = differing(found, expected)
        note(f"{name} after {after_s:.2f} s of {run_s:.2f}: {gap_s:.2f} s without tokens, {counts}")
        if name == "raylet":
            cluster.add_node(num_cpus=NUM_CPUS)
        if engine.loop.statistics()["rebuilds"] == before and not counts["lost"]:
            note("the fault came after the last token")
            time.sleep(SETTLE_S)
            continue
        sums = {key: total + int(counts[key]) for key, total in sums.items()}
        largest = max(largest, counts["logprob_gap"])
        gaps.append(gap_s)
    requests = repeats * (NUM_STREAMS + NUM_PLAIN)
    times = {"p50_s": float(np.median(gaps)), "worst_s": max(gaps)}
    return {"repeats": repeats, "requests": requests, **sums, **times, "logprob_gap": largest}


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_nodes.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    rows = json.loads(arguments.out.read_text(encoding="utf-8"))["rows"] if arguments.out.exists() else {}
    set_environment_defaults({name: value for name, value in DEFAULTS.items() if name.startswith("RAY_health")})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=NUM_CPUS)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    path = checkpoint_of("tiny")
    values = {"max_model_len": 256, "max_running_requests": 48, "precompile_bs_paddings": [48], "max_step_tokens": 128}
    hosts = {"num_hosts": 2, "cpus_per_host": NUM_CPUS, "standby_workers": False, "enable_return_routed_experts": True}
    bounds = {"max_rebuilds_in_10_minutes": 1000, "max_rebuilds_in_hour": 1000}
    engine = start_replica_engine(settings_from({"model_path": str(path), **values, **hosts, **bounds}))
    try:
        for name in arguments.faults:
            if name == "keeper":
                send_weights(engine, path)
            rows[name] = {**repeat(cluster, engine, name, repeats=arguments.repeats), "load_before": load_before}
            save({"machine": machine_facts(load_before), "rows": rows}, arguments.out)
    finally:
        engine.shutdown()
        ray.shutdown()
        cluster.shutdown()
    print(table_of(rows))


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Return the repeats as Markdown."""
    headings = ["fault", "repeats", "requests", "lost", "tokens", "rows", "outage p50, s", "worst, s", "log-prob gap"]
    columns = ("repeats", "requests", "lost", "tokens", "rows")
    lines = [
        [
            name,
            *(str(row[column]) for column in columns),
            f"{row['p50_s']:.1f}",
            f"{row['worst_s']:.1f}",
            f"{row['logprob_gap']:.0e}",
        ]
        for name, row in rows.items()
    ]
    return markdown_table(headings, lines)


if __name__ == "__main__":
    main()
