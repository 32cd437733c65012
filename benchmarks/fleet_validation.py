"""The simulation of a fleet against the fleet: the same conversations, played to replicas that have a core each.

    python -m benchmarks.fleet_validation [--size mid] [--replicas 2] [--requests 150] [--load 0.5] [--out FILE.json]

Step times are fitted before, to streams that each replica is asked for directly, then scaled to a first run of other
conversations at half the rate. The fleet starts on one core, so that its kernels take one thread; then each replica and
its worker are held to a core of their own, and all else may use any.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.fleet_table import fleet_validation
from benchmarks.serve_process import HOST, ServeProcess
from benchmarks.simulation.calibrate import calibrate, fitted_to
from benchmarks.simulation.client import play
from benchmarks.simulation.costs import MeasuredSteps
from benchmarks.simulation.fleet import simulate
from benchmarks.simulation.replica import SimulatedReplica
from benchmarks.simulation.workloads import Conversation, Shape, drawn
from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.scheduling.scheduler import StepLimits

SHAPE = Shape((100, 0.8), (48, 0.5), common=64, turns=4.0, gap_s=1.0, longest=1500)
LIMITS = StepLimits(num_rows=16, step_tokens=256, chunk_tokens=256, page_size=16, num_pages=1200, max_tokens=2048)
TTFT_S, TPOT_S = 2.0, 0.2
_REPLICA = re.compile(r"^ +server \S+ \S+:(\d+) check observe ", re.MULTILINE)


def settings(size: str, num_replicas: int) -> dict[str, Any]:
    """Return the settings of the served fleet, from `LIMITS`."""
    return {
        "model_path": str(checkpoint_of(size)),
        "num_replicas": num_replicas,
        "max_running_requests": LIMITS.num_rows,
        "max_step_tokens": LIMITS.step_tokens,
        "page_size": LIMITS.page_size,
        "num_pages": LIMITS.num_pages,
        "max_model_len": LIMITS.max_tokens,
        "cpus_per_host": 0.25,
    }


def replica_ports(server: ServeProcess) -> list[int]:
    """Return the ports of the replicas by the configuration of the running HAProxy."""
    for pid in server.pids_of("haproxy"):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        text = Path(os.fsdecode(words[words.index(b"-f") + 1])).read_text(encoding="utf-8")
        if found := _REPLICA.findall(text):
            return [int(port) for port in found]
    raise RuntimeError("HAProxy has no replicas")


def hold(server: ServeProcess, cores: Sequence[int]) -> None:
    """Hold each replica and one worker to a core, and let all else use any."""
    for pid in server.pids_of(""):
        allow(pid, cores)
    for title in ("ray::ServeReplica:bench:moe-server", "ray::HostWorker"):
        for place, pid in enumerate(server.pids_of(title)):
            allow(pid, [cores[place % len(cores)]])


def allow(pid: int, cores: Sequence[int]) -> None:
    """Pin all threads of a process to `cores`."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended, or is the kernel's


def rate_for(times: MeasuredSteps, load: float, num_replicas: int) -> float:
    """Return the requests per second that keep replicas busy for this share of the time, were each request alone."""
    mean = sum(turn.num_tokens for one in drawn(SHAPE, rate=1.0, num_requests=500, seed=9) for turn in one.turns) / 500
    alone = mean * times.prompt_s + SHAPE.answer[0] * (times.step_s + 4 * times.row_s) / 4
    return num_replicas * load / alone


def compare(size: str, *, num_replicas: int, num_requests: int, load: float) -> dict[str, Any]:
    """Serve, fit, play, simulate; returns both sides' figures."""
    cores = sorted(os.sched_getaffinity(0))
    vocab_size = PRESETS[size].vocab_size
    os.sched_setaffinity(0, cores[:1])
    try:
        server = ServeProcess(settings(size, num_replicas))
    finally:
        os.sched_setaffinity(0, cores)
    with server:
        hold(server, cores[:num_replicas] if num_replicas <= len(cores) else cores)
        address = (HOST, server.port)
        replicas = [(HOST, port) for port in replica_ports(server)]
        times = asyncio.run(calibrate(address, replicas, vocab_size=vocab_size))
        note(str(times))
        rate = rate_for(times, load, num_replicas)

        def run(rate: float, seed: int) -> tuple[list[Conversation], dict[str, float]]:
            asked = list(drawn(SHAPE, rate=rate, num_requests=num_requests, seed=seed))
            seen = asyncio.run(play(address, asked, vocab_size=vocab_size, num_replicas=num_replicas))
            return asked, seen.figures(ttft_s=TTFT_S, tpot_s=TPOT_S)

        known, shown = run(rate / 2, seed=2)
        times = fitted_to(shown, times, simulate=partial(_simulated, known, num_replicas=num_replicas))
        note(str(times))
        conversations, real = run(rate, seed=1)
    return {
        "size": size,
        "num_replicas": num_replicas,
        "rate_s": rate,
        "times": asdict(times),
        "real": real,
        "simulated": _simulated(conversations, times, num_replicas=num_replicas),
    }


def _simulated(conversations: list[Conversation], times: MeasuredSteps, *, num_replicas: int) -> dict[str, float]:
    how = {"num_replicas": num_replicas, "request_s": times.request_s}
    seen = simulate("prefix", lambda: SimulatedReplica(LIMITS, times), conversations, **how)
    return seen.figures(ttft_s=TTFT_S, tpot_s=TPOT_S)


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(PRESETS), default="mid")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet_validation.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    how = {"num_replicas": arguments.replicas, "num_requests": arguments.requests, "load": arguments.load}
    measured = compare(arguments.size, **how)
    save({"validation_machine": machine_facts(load_before), "fleet_validation": measured}, arguments.out)
    print(fleet_validation(measured))


if __name__ == "__main__":
    main()
