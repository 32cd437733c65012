"""What clients see when a part of a running server is killed or hangs, and how long until requests are served again.

    python -m benchmarks.kill_table [--hosts 1 2] [--faults "worker killed" ...] [--out FILE.json]

One server per number of hosts; the faults follow each other, each on a server that serves again. 16 streams and 16
plain requests run when the fault comes; short requests and `/health` are asked from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.kill_clients import Seen, completion, health
from benchmarks.markdown import markdown_table
from benchmarks.serve_process import ServeProcess

NUM_STREAMS = NUM_PLAIN = 16
MAX_TOKENS = 1000
STEP_TIMEOUT_S = 10.0
LEAST_WATCH_S, MOST_WATCH_S, QUIET_S = 20.0, 180.0, 3.0
PROBE_EVERY_S, PROBE_LIMIT_S, HEALTH_LIMIT_S = 0.5, 60.0, 5.0
SETTINGS: dict[str, Any] = {
    "model_path": "trained:calculator",
    "max_model_len": 2048,
    "max_running_requests": 48,
    "precompile_bs_paddings": [48],
    "max_step_tokens": 256,
    "step_timeout_s": STEP_TIMEOUT_S,
}


@dataclass(frozen=True)
class Fault:
    """A signal to the process whose title begins so, the last one where there are several."""

    title: str
    signal: signal.Signals = signal.SIGKILL


FAULTS = {
    "worker killed": Fault("ray::HostWorker"),
    "worker hung": Fault("ray::HostWorker", signal.SIGSTOP),
    "replica killed": Fault("ray::ServeReplica"),
    "HAProxy killed": Fault("haproxy"),
    "HAProxy's manager killed": Fault("ray::HAProxyManager"),
    "controller killed": Fault("ray::ServeController"),
}


async def watch(serve: ServeProcess, fault: Fault) -> dict[str, Any]:
    """Load the server, deliver the fault, ask on until it serves again; returns a row of the table."""
    firsts = [asyncio.Event() for _ in range(NUM_STREAMS)]
    limit_s = MOST_WATCH_S
    streams = [
        asyncio.create_task(completion(serve.port, max_tokens=MAX_TOKENS, streams=True, limit_s=limit_s, first=first))
        for first in firsts
    ]
    plain = [
        asyncio.create_task(completion(serve.port, max_tokens=MAX_TOKENS, streams=False, limit_s=limit_s))
        for _ in range(NUM_PLAIN)
    ]
    await asyncio.wait_for(asyncio.gather(*(first.wait() for first in firsts)), MOST_WATCH_S)
    victim = serve.pids_of(fault.title)[-1]
    started_at = time.monotonic()
    os.kill(victim, fault.signal)
    probes, checks = await _probe(serve.port, [*streams, *plain], started_at)
    if fault.signal == signal.SIGSTOP:
        _end(victim)
    return {
        "served_after_s": served_after(probes, started_at),
        "streams": Counter(task.result().kind for task in streams),
        "plain": Counter(task.result().kind for task in plain),
        "probes": _counts(probes),
        "health": _counts(checks),
        "slowest_health_s": max(check.ended_at - check.asked_at for check in checks),
        "slowest_refusal_s": max((p.ended_at - p.asked_at for p in probes if not p.is_served), default=0.0),
    }


async def _probe(port: int, clients: list[asyncio.Task[Seen]], started_at: float) -> tuple[list[Seen], list[Seen]]:
    """Ask for a few tokens and for `/health`, over and over, until all is well for a while."""
    asking: list[asyncio.Task[Seen]] = []
    checking: list[asyncio.Task[Seen]] = []
    while not _is_over(asking, clients, started_at):
        asking.append(
            asyncio.create_task(completion(port, max_tokens=4, streams=False, limit_s=PROBE_LIMIT_S)),
        )
        checking.append(asyncio.create_task(health(port, limit_s=HEALTH_LIMIT_S)))
        await asyncio.sleep(PROBE_EVERY_S)
    return list(await asyncio.gather(*asking)), list(await asyncio.gather(*checking))


def _is_over(asking: list[asyncio.Task[Seen]], clients: list[asyncio.Task[Seen]], started_at: float) -> bool:
    now = time.monotonic()
    if now - started_at > MOST_WATCH_S:
        return True
    ended = [task.result() for task in asking if task.done()]
    is_well = all(seen.is_served for seen in ended if seen.ended_at > now - QUIET_S)
    num_pending = len(asking) - len(ended)
    return now - started_at > LEAST_WATCH_S and is_well and num_pending < 3 and all(task.done() for task in clients)


def served_after(probes: Sequence[Seen], started_at: float) -> float | None:
    """Return seconds from the fault to the first answer after the last failure; 0 without a failure, None for never."""
    failed = [probe.asked_at for probe in probes if not probe.is_served]
    if not failed:
        return 0.0
    served = [probe.ended_at for probe in probes if probe.is_served and probe.asked_at > max(failed)]
    return round(min(served) - started_at, 1) if served else None


def _counts(seen: Sequence[Seen]) -> Counter[str]:
    return Counter(each.kind + (" + Retry-After" if each.retry_after else "") for each in seen)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        note("the hung process is gone already")


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Render the kill table as Markdown."""
    headings = [
        "fault",
        "served after, s",
        "16 streams",
        "16 plain",
        "requests since",
        "/health since",
        "slowest /health, s",
    ]
    lines = [
        [
            name,
            "never" if row["served_after_s"] is None else f"{row['served_after_s']:.1f}",
            *(_said(row[column]) for column in ("streams", "plain", "probes", "health")),
            f"{row['slowest_health_s']:.1f}",
        ]
        for name, row in rows.items()
    ]
    return markdown_table(headings, lines)


def _said(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or "-"


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_table.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    rows: dict[str, dict[str, Any]] = {}
    for num_hosts in arguments.hosts:
        with ServeProcess({**SETTINGS, "num_hosts": num_hosts}) as serve:
            for name in arguments.faults:
                rows[f"{name}, {num_hosts} host{'s'[: num_hosts - 1]}"] = row = asyncio.run(watch(serve, FAULTS[name]))
                note(f"{name}: {row}")
    save({"machine": machine_facts(load_before), "step_timeout_s": STEP_TIMEOUT_S, "rows": rows}, arguments.out)
    print(table_of(rows))


if __name__ == "__main__":
    main()
