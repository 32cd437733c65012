"""A start of several hosts, seconds by phase: cold, and with every program on disk.

    python -m benchmarks.host_start [--hosts 2] [--cold 2] [--warm 5] [--out FILE.json]

Phases are those that the replica goes through, by the wall; `describing` is what comes before and after them. Ray runs
already. Every cold start has a folder of its own for programs, and warm ones find those of the last.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.kill_table import SETTINGS
from benchmarks.markdown import markdown_table
from rayserve_moe.checkpoints.model_path import resolve_model_path
from rayserve_moe.cluster import group_executor
from rayserve_moe.cluster.group_executor import PhaseClock
from rayserve_moe.cluster.replica_engine import start_replica_engine
from rayserve_moe.config.load import default_cache_directory, settings_from

REST, ALL = "describing", "all"
Seconds = dict[str, float]


class NotedClock(PhaseClock):
    """Notes when each phase began: the replica itself forgets those of its start."""

    begun: list[tuple[str, float]] = []  # noqa: RUF012

    def enter(self, phase: str) -> None:
        self.begun.append((phase, time.monotonic()))
        super().enter(phase)


def start_once(settings: dict[str, Any], programs: Path) -> tuple[Seconds, int, int]:
    """Return seconds by phase of one start, how many programs a host has, and how many it found."""
    NotedClock.begun.clear()
    begun = time.monotonic()
    engine = start_replica_engine(settings_from({**settings, "compile_cache": str(programs)}))
    all_s, report, phases = time.monotonic() - begun, engine.loop.start_report, [*NotedClock.begun]
    engine.shutdown()
    seconds = {name: after - at for (name, at), (_, after) in itertools.pairwise(phases)}
    return {REST: all_s - sum(seconds.values()), **seconds, ALL: all_s}, report.num_programs, report.num_programs_found


def measure(settings: dict[str, Any], *, num_cold: int, num_warm: int) -> dict[str, list[Seconds]]:
    """Measure cold starts, then warm ones. RuntimeError if a start finds other programs than it should."""
    runs: dict[str, list[Seconds]] = {"cold": [], "programs on disk": []}
    for number in range(num_cold):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("cold", *["programs on disk"] * (num_warm if number == num_cold - 1 else 0)):
                seconds, count, found = start_once(settings, Path(folder))
                if found != (0 if name == "cold" else count):
                    raise RuntimeError(f"{name}: {found} of {count} programs were found")
                note(f"{name}: { ({phase: round(value, 2) for phase, value in seconds.items()}) }")
                runs[name].append(seconds)
    return runs


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--cold", type=int, default=2)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "host_start.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    group_executor.PhaseClock = NotedClock
    ray.init("local", num_cpus=2 * arguments.hosts, include_dashboard=False, log_to_driver=False)
    path = resolve_model_path(SETTINGS["model_path"], cache_directory=default_cache_directory())
    settings = {**SETTINGS, "model_path": str(path), "num_hosts": arguments.hosts}
    try:
        runs = measure(settings, num_cold=arguments.cold, num_warm=arguments.warm)
    finally:
        ray.shutdown()
    save({"machine": machine_facts(load_before), "hosts": arguments.hosts, "runs": runs}, arguments.out)
    print(table_of(runs))


def table_of(runs: dict[str, list[Seconds]]) -> str:
    """Render medians and the range of all starts, as Markdown."""
    phases = list(next(iter(runs.values()))[0])
    lines = []
    for name, starts in runs.items():
        columns = [[start.get(phase, 0.0) for start in starts] for phase in phases]
        said = [f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})" for values in columns]
        lines.append([name, str(len(starts)), *said])
    return markdown_table(["start, s", "starts", *phases], lines)


if __name__ == "__main__":
    main()
