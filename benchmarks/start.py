"""A start of `rayserve-moe serve` by stages: wall seconds, CPU-seconds and console lines.

    python -m benchmarks.start [--config FILE.yaml] [--starts 3] [--cache DIR] [--processes] [--out FILE.json]

A stage ends with a line of the command. The first start finds an empty cache, unless `--cache` names one that was
filled; the others find what the first one left. `--processes` prints when each process began, and its CPU-seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.markdown import markdown_table
from benchmarks.serve_process import _family, _processes, free_port, is_healthy

LINE = "rayserve-moe serve: "
COMMAND, HEALTHY, ANSWER = "command", "served", "first answer"
SAMPLE_S = 0.1
LIMIT_S = 600.0


@dataclass
class Start:
    """One start: what it took in all, by stage, and by process."""

    healthy_s: float = 0.0
    answer_s: float = 0.0
    cpu_s: float = 0.0
    num_lines: int = 0
    num_own_lines: int = 0
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, wall seconds and CPU-seconds."""
    processes: list[tuple[str, float, float]] = field(default_factory=list)
    """Title, seconds from the start of the command to the first sight of it, CPU-seconds."""


class ProcessSampler:
    """CPU-seconds of a process and all that it starts, those that have ended included, as of the last look."""

    def __init__(self, root: int) -> None:
        self._root, self._begun = root, time.monotonic()
        self.seen: dict[int, tuple[str, float, float]] = {}

    def look(self) -> float:
        """Note every process; returns the CPU-seconds of all until now."""
        processes = _processes()
        for pid in _family(processes, self._root):
            _, title, spent = processes[pid]
            _, first, before = self.seen.get(pid, (title, time.monotonic() - self._begun, 0.0))
            self.seen[pid] = title, first, max(spent, before)
        return sum(spent for _, _, spent in self.seen.values())


def start_once(config: dict[str, Any], cache: Path) -> Start:
    """Start a server, wait until it is healthy, ask it once, and stop it. RuntimeError where it ends before."""
    port, model = free_port(), config["applications"][0]["args"].get("served_model_name", "default")
    config = {**config, "http_options": {"host": "127.0.0.1", "port": port}}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        file = Path(folder, "config.yaml")
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "rayserve_moe.cli", "serve", str(file)]
        begun = time.monotonic()
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            return _watched(child, begun, port=port, model=model)
        finally:
            child.send_signal(signal.SIGINT)
            child.wait()


def _watched(child: subprocess.Popen[str], begun: float, *, port: int, model: str) -> Start:
    sampler, said, lines = ProcessSampler(child.pid), queue.Queue(), []
    assert child.stdout is not None
    reading = threading.Thread(target=_read, args=(child.stdout, said), daemon=True)
    reading.start()
    start, stage, since, spent_before = Start(), COMMAND, begun, 0.0

    def enter(name: str, at: float) -> None:
        nonlocal stage, since, spent_before
        spent = sampler.look()
        start.stages.append((stage, at - since, spent - spent_before))
        stage, since, spent_before = name, at, spent

    while not is_healthy(port):
        if child.poll() is not None or time.monotonic() - begun > LIMIT_S:
            raise RuntimeError("the server did not start:\n" + "".join(line for _, line in lines)[-3000:])
        sampler.look()
        for at, line in _drained(said, lines):
            if line.startswith(LINE):
                enter(line.removeprefix(LINE).strip()[:40], at)
        time.sleep(SAMPLE_S)
    enter(ANSWER, time.monotonic())
    start.healthy_s = since - begun
    ask(port, model)
    enter("", time.monotonic())
    start.answer_s = since - begun
    start.cpu_s = spent_before
    _drained(said, lines)
    start.num_lines = len(lines)
    start.num_own_lines = sum(line.startswith("rayserve-moe") for _, line in lines)
    start.processes = sorted(sampler.seen.values(), key=lambda one: one[1])
    return start


def _read(stream: Any, said: queue.Queue[tuple[float, str]]) -> None:
    for line in stream:
        said.put((time.monotonic(), line))


def _drained(said: queue.Queue[tuple[float, str]], lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Take what the console has said since; it is added to `lines`."""
    found = []
    while not said.empty():
        found.append(said.get())
    lines += found
    return found


def ask(port: int, model: str) -> str:
    """Return the answer to a sum; retry for 10 s while the server is not ready."""
    body = json.dumps({"model": model, "prompt": "37+45=", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 10
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/qwen3_moe.yaml"))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="a folder of programs, filled by an earlier start")
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "start.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="start-cache-") as folder:
        cache = arguments.cache or Path(folder)
        starts = []
        for number in range(arguments.starts):
            starts.append(start_once(config, cache))
            note(f"start {number + 1}: {starts[-1].healthy_s:.1f} s")
    runs = {"nothing on disk": starts[:1], "programs on disk": starts[1:]}
    if arguments.cache is not None:
        runs = {"programs on disk": starts}
    runs = {name: found for name, found in runs.items() if found}
    shown = sorted({each.name for each in fields(Start)} - {"processes"})  # whose titles have this machine's paths
    result = {name: [{key: getattr(one, key) for key in shown} for one in found] for name, found in runs.items()}
    save({"machine": machine_facts(load_before), "config": str(arguments.config), "runs": result}, arguments.out)
    for name, found in runs.items():
        print(f"{name}, {len(found)} starts\n\n{stage_table(found)}\n")
    if arguments.processes:
        rows = [(title[:110], f"{at:.1f}", f"{spent:.1f}") for title, at, spent in starts[-1].processes]
        print(markdown_table(["process", "seen after, s", "CPU, s"], rows))


def stage_table(starts: list[Start]) -> str:
    """Render medians of the stages of starts that say the same lines, and what all stages took."""
    rows: list[list[str]] = []
    for stages in zip(*(start.stages for start in starts), strict=False):
        walls, spent = [one[1] for one in stages], [one[2] for one in stages]
        rows.append([stages[0][0], _median(walls), _median(spent)])
    rows.append(["healthy", _median([one.healthy_s for one in starts]), _median([one.cpu_s for one in starts])])
    lines = _median([one.num_lines for one in starts]), _median([one.num_own_lines for one in starts])
    rows.append([f"console lines: {lines[0]}, of the command {lines[1]}", "", ""])
    return markdown_table(["stage", "wall, s", "CPU, s"], rows)


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}"


if __name__ == "__main__":
    main()
