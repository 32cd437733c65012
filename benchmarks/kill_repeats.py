"""Kill or stop a worker at random moments, over and over, under streams and plain requests that must not notice.

    python -m benchmarks.kill_repeats [--hosts 1 2] [--signals SIGKILL] [--repeats 20] [--max-tokens 1000] [--standbys]
                                      [--moments any prefill decode rebalance staging crossed] [--size small]
                                      [--out FILE.json]

Every answer is compared with that of an undisturbed run: text, log-probs of its tokens, and routing rows. Those that
cross an update of the weights are compared as `kill_compared` says. The longest time in which no stream got anything is
the outage. A signal after which no worker was replaced, or that missed its moment, is sent again in a further repeat.
Rows that the result file has already, of other faults, stay.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.kill_asking import LIMIT_S, Answer, Asked, Fault, answers
from benchmarks.kill_compared import Undisturbed, compared
from benchmarks.kill_moments import MOMENTS, PROMPT_REPEATS, WITH_UPDATES, Delivery, Timing, other_weights, updated
from benchmarks.kill_table import MAX_TOKENS, NUM_PLAIN, NUM_STREAMS, SETTINGS
from benchmarks.markdown import markdown_table
from benchmarks.serve_process import HOST, ServeProcess
from rayserve_moe.checkpoints.model_path import SYNTHETIC_PREFIX, resolve_model_path
from rayserve_moe.config.load import default_cache_directory

POLL_S = 0.2
BOUNDS = {"max_rebuilds_in_10_minutes": 1000, "max_rebuilds_in_hour": 1000}
COUNTED = ("lost", "tokens", "logprobs", "rows", "crossed")
HEADINGS = {"logprobs": "log-probs", "crossed": "crossed an update"}
WORKER = "ray::HostWorker"
SECONDS_BETWEEN = 6.0
"""From the end of a repeat to the next: a standby takes a few seconds to be there."""


class Victims:
    """The workers of a server, and the signal that a random one of them gets."""

    def __init__(self, serve: ServeProcess, sent: signal.Signals, *, num_hosts: int) -> None:
        self._serve, self._sent, self._num_hosts = serve, sent, num_hosts

    def kill_one(self) -> None:
        """Send it to one of those that serve by now."""
        os.kill(random.choice(busiest(self._serve, self._num_hosts)), self._sent)


@dataclass(frozen=True)
class Way:
    """What is asked of a server, and when the signal comes; `checkpoints` are what it serves in turn, by version."""

    port: int
    moment: str
    max_tokens: int
    checkpoints: dict[str, Path]

    def asked(self, salt: str) -> Asked:
        return Asked(self.max_tokens, PROMPT_REPEATS.get(self.moment, 1), salt)

    def run(self, asked: Asked, *, fault: Fault | None = None) -> tuple[list[Answer | str], float]:
        return asyncio.run(answers(self.port, asked, fault=fault))

    def update(self, version: str) -> float:
        """Have other weights serve; returns the seconds. RuntimeError where that is refused."""

        async def update() -> bool:
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{self.port}", timeout=LIMIT_S) as client:
                return await updated(client, self.checkpoints[version], version)

        begun = time.monotonic()
        if not asyncio.run(update()):
            raise RuntimeError(f"the update to {version} is refused")
        return time.monotonic() - begun

    def undisturbed(self) -> tuple[dict[str, Undisturbed], Timing]:
        """Return the answers under every weight version and the seconds taken; then the first version serves again."""
        expected, update_s = {}, 0.0
        for version in [*self.checkpoints][::-1]:
            update_s = self.update(version) if version else update_s
            self.run(self.asked(f"warm {version}"))
            asked, begun = self.asked(f"undisturbed {version}"), time.monotonic()
            found, _ = self.run(asked)
            timing = Timing(time.monotonic() - begun, asked.decode_at - begun, update_s)
            expected[weight_version(self.port)] = Undisturbed(found, asked)
        return expected, timing


def repeat(way: Way, victims: Victims, *, repeats: int) -> dict[str, Any]:
    """Deliver the signal in the moment over and over; return sums, the largest gap and the outages."""
    expected, timing = way.undisturbed()
    versions = [*way.checkpoints]
    sums, largest, gaps, number = dict.fromkeys(COUNTED, 0), 0.0, [], 0
    while len(gaps) < repeats:
        number += 1
        time.sleep(SECONDS_BETWEEN)
        wait_until_ready(way.port)
        before, asked = num_rebuilds(way.port), way.asked(f"repeat {number}")
        version = versions[1 - versions.index(weight_version(way.port))] if len(versions) > 1 else ""
        delivery = Delivery(victims.kill_one, way.port, timing, update=(way.checkpoints[version], version))
        found, gap_s = way.run(asked, fault=delivery.at(way.moment))
        counts = compared(found, asked, expected)
        is_late = num_rebuilds(way.port) == before or not delivery.hit
        note(f"{way.moment}: {gap_s:.2f} s without tokens, {counts}{', the moment was missed' if is_late else ''}")
        if is_late and not any(counts[name] for name in ("lost", "tokens", "rows")):
            continue
        sums = {name: total + int(counts[name]) for name, total in sums.items()}
        largest = max(largest, counts["logprob_gap"])
        gaps.append(gap_s)
    requests = repeats * (NUM_STREAMS + NUM_PLAIN)
    times = {"p50_s": float(np.median(gaps)), "worst_s": max(gaps)}
    return {"repeats": repeats, "requests": requests, **sums, **times, "logprob_gap": largest}


def weight_version(port: int) -> str:
    """Return the version of the serving weights."""
    return httpx.get(f"http://{HOST}:{port}/get_weight_version", timeout=LIMIT_S).json()["weight_version"]


def wait_until_ready(port: int) -> None:
    """Wait for the workers of a server. TimeoutError after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while httpx.get(f"http://{HOST}:{port}/ready", timeout=LIMIT_S).status_code != 200:
        if time.monotonic() > deadline:
            raise TimeoutError("the server is not ready")
        time.sleep(POLL_S)


def num_rebuilds(port: int) -> float:
    """Return the number of times that the workers of a server were replaced."""
    lines = httpx.get(f"http://{HOST}:{port}/metrics", timeout=LIMIT_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("rayserve_moe_rebuilds_total"))


def busiest(serve: ServeProcess, num_hosts: int) -> list[int]:
    """Return the workers that serve: a standby has used less CPU time."""
    pids = serve.pids_of(WORKER)
    return sorted(pids, key=cpu_ticks)[-num_hosts:]


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process in clock ticks; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[11]) + int(fields[12])


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--signals", nargs="+", choices=["SIGKILL", "SIGSTOP"], default=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--moments", nargs="+", choices=list(MOMENTS), default=["any"])
    parser.add_argument("--size", default="", help="preset of a synthetic model, in place of the embedded one")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--standbys", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_repeats.json")
    arguments = parser.parse_args()
    saved = saved_result(arguments.out)
    load_before, rows, loads = load_before_start(), saved["rows"], saved["loads"]
    model = {"model_path": f"{SYNTHETIC_PREFIX}{arguments.size}"} if arguments.size else {}
    common = {**SETTINGS, **model, **BOUNDS, "standby_workers": arguments.standbys}
    for num_hosts, moment in itertools.product(arguments.hosts, arguments.moments):
        settings = {**common, "enable_return_routed_experts": True, "num_hosts": num_hosts, **MOMENTS[moment]}
        with ServeProcess(settings) as serve, tempfile.TemporaryDirectory() as folder:
            checkpoints = two_checkpoints(settings, Path(folder)) if moment in WITH_UPDATES else {"": Path()}
            way = Way(serve.port, moment, arguments.max_tokens, checkpoints)
            for name in arguments.signals:
                said = [name, f"{num_hosts} host{'s'[: num_hosts - 1]}", *["standbys"] * arguments.standbys]
                key = ", ".join([*said, *[moment] * (moment != "any"), *[arguments.size] * bool(arguments.size)])
                victims = Victims(serve, signal.Signals[name], num_hosts=num_hosts)
                rows[key] = repeat(way, victims, repeats=arguments.repeats)
                loads[key] = load_before
                save({"machine": machine_facts(load_before), "loads": loads, "rows": rows}, arguments.out)
    print(table_of(rows))


def two_checkpoints(settings: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Return the checkpoint of a server and another one like it, by the names of their weights."""
    path = resolve_model_path(settings["model_path"], cache_directory=default_cache_directory())
    return {"A": path, "B": other_weights(path, folder)}


def saved_result(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a result file, and the load of the machine before each; empty where there is no such file."""
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = saved.get("rows", {})
    return {
        "rows": rows,
        "loads": saved.get("loads") or dict.fromkeys(rows, saved.get("machine", {}).get("load_before")),
    }


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Return the repeats as Markdown."""
    headings = ["fault", "repeats", "requests", *(HEADINGS.get(name, name) for name in COUNTED)]
    lines = [
        [
            key,
            *(str(row[name]) for name in ("repeats", "requests")),
            *(str(row.get(name, 0)) for name in COUNTED),
            *(f"{row[name]:.1f}" for name in ("p50_s", "worst_s")),
            f"{row.get('logprob_gap', 0.0):.1e}",
        ]
        for key, row in rows.items()
    ]
    return markdown_table([*headings, "outage p50, s", "worst, s", "largest log-prob gap"], lines)


if __name__ == "__main__":
    main()
