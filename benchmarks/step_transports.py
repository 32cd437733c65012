"""What a step costs on its way to two hosts and back, by transport: time of a round trip, and CPU time.

    python -m benchmarks.step_transports [--steps 500] [--repeats 5] [--out FILE.json]

The hosts are actors on two raylets of this machine. They answer with routing rows as a decode step of Qwen3-30B-A3B
has them (48 layers, top 8) for 16 and for 256 sequences, and compute nothing. For the CPU time they sleep for 2 ms, the
length of a short step; counted is what both ends take per step meanwhile. A repeat has every transport once, each time
with another one first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.engine_runs import in_turn
from benchmarks.table import tables
from rayserve_moe.cluster.channel import Address
from rayserve_moe.cluster.step_transport import TRANSPORTS, CompiledGraph, StepTransport, listen_for_steps
from rayserve_moe.scheduling.step_plan import Chunks, StepPlan, StepResult

LAYERS, TOP_K = 48, 8
WAITING_S = 0.002
COMPILE_TIMEOUT_S = 60.0


class AnsweringHost:
    """In the place of a host worker: answers with a row of routing per token, after as long as it is told to take."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def take(self, seconds: float) -> None:
        self._seconds = seconds

    def execute(self, plan: StepPlan) -> StepResult:
        if self._seconds:
            time.sleep(self._seconds)
        num_tokens = plan.num_tokens
        routing = np.zeros((num_tokens, LAYERS, TOP_K), np.uint8)
        logprobs = np.zeros(num_tokens, np.float32)
        return StepResult(plan.step_id, plan.chunks.token_ids, logprobs, np.ones(num_tokens, bool), routing)

    def listen_for_steps(self, key: bytes, timeout_s: float) -> Address:
        return listen_for_steps(self.execute, host=ray.util.get_node_ip_address(), key=key, timeout_s=timeout_s)

    def cpu_seconds(self) -> float:
        return time.process_time()


def decode_plan(step_id: int, num_sequences: int) -> StepPlan:
    """Return a plan with a token per sequence."""
    each = np.arange(num_sequences)
    return StepPlan(
        step_id, Chunks(each, each, np.ones_like(each), each.astype(np.int32), np.ones(num_sequences, bool))
    )


def connected(name: str, hosts: list[ActorHandle]) -> StepTransport:
    """Yield a transport under steady load."""
    transport = TRANSPORTS[name](hosts, timeout_s=COMPILE_TIMEOUT_S)
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    while isinstance(transport, CompiledGraph) and not transport.is_compiled:
        if time.monotonic() > deadline:
            raise TimeoutError("the graph was not compiled")
        transport.execute(StepPlan(0))
    return transport


def measure(transport: StepTransport, hosts: list[ActorHandle], *, num_steps: int) -> dict[str, float]:
    """Measure microseconds of a round trip by number of sequences, and of CPU time in a step with waiting hosts."""
    figures = {f"{rows}_us": 1e6 * median(_round_trips(transport, rows, num_steps)) for rows in (16, 256)}
    ray.get([host.take.remote(WAITING_S) for host in hosts])
    before = _cpu_seconds(hosts)
    _round_trips(transport, 16, num_steps)
    figures["waiting_cpu_us"] = 1e6 * (_cpu_seconds(hosts) - before) / num_steps
    ray.get([host.take.remote(0.0) for host in hosts])
    return figures


def _round_trips(transport: StepTransport, num_sequences: int, num_steps: int) -> list[float]:
    seconds = []
    for step_id in range(num_steps):
        plan, started = decode_plan(step_id, num_sequences), time.perf_counter()
        transport.execute(plan)
        seconds.append(time.perf_counter() - started)
    return seconds


def _cpu_seconds(hosts: list[ActorHandle]) -> float:
    return time.process_time() + sum(ray.get([host.cpu_seconds.remote() for host in hosts]))


def compare(*, num_steps: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Measure every transport in turn, each over hosts of its own, after an uncounted round."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in TRANSPORTS}
    for repeat in range(-1, repeats):
        for name in in_turn(list(TRANSPORTS), repeat + 1):
            options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "enable_task_events": False}
            hosts = [ray.remote(AnsweringHost).options(**options).remote() for _ in range(2)]
            transport = connected(name, hosts)
            runs[name].append(measure(transport, hosts, num_steps=num_steps))
            transport.release()
            for host in hosts:
                ray.kill(host)
            note(f"{repeat + 1}/{repeats}: {name} {runs[name][-1]}")
    return {name: each[1:] for name, each in runs.items()}


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "step-transports.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        runs: dict[str, Any] = compare(num_steps=arguments.steps, repeats=arguments.repeats)
    finally:
        ray.shutdown()
        cluster.shutdown()
    result = {"facts": machine_facts(load_before), "step_transports": runs}
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
