"""Kill parts of the GRPO example at random moments: the run goes on, and its curve is that of an undisturbed one.

    python -m benchmarks.kill_training DIRECTORY [--seeds 0 1 2 3 4] [--out FILE.json]

Of each seed one run is left alone, and one loses its trainer (which takes its server along, and is started again by the
same command), all processes of its server, its replica, and the worker of its host, once each, in random order and at
random moments of its steps. Every step of the two runs is compared: its number, rewards, tokens and weight version have
to be equal. The trainer's sums are not the same to the last bit from run to run, so the held-out probability may
drift: by how much is said. The problems and seeds of a step follow from its number, so steps that follow each other
without a gap use every sample once. Runs that DIRECTORY has already are read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.markdown import markdown_table
from benchmarks.serve_process import pids_under

TRAINER, SERVER = "trainer", "server"
TITLES = {TRAINER: "", SERVER: "", "replica": "ray::ServeReplica", "worker": "ray::HostWorker"}
"""What is killed, and the title of its process."""
LIMIT_S, POLL_S = 600.0, 0.05
FIRST, APART = 3, 5
"""Steps before the first fault, and those over which the moment of each one is spread."""
COMPARED = ("step", "reward", "dead", "tokens", "version")
Row = dict[str, Any]


def started(out: Path, seed: int) -> subprocess.Popen[bytes]:
    """Begin a run, or go on with it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "output").open("ab") as output:
        command = [sys.executable, "-m", "examples.grpo", "--out", str(out), "--seed", str(seed), "--dtype", "float32"]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def rows_of(out: Path) -> list[Row]:
    """Return the measurements of a run so far, a row per step."""
    with suppress(FileNotFoundError, json.JSONDecodeError):  # it is being written
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return []


def wait_until_over(child: subprocess.Popen[bytes], out: Path) -> list[Row]:
    """Wait until the run is over. RuntimeError if it fails."""
    if child.wait(timeout=LIMIT_S):
        raise RuntimeError(f"the run failed: {(out / 'output').read_text(encoding='utf-8', errors='replace')[-3000:]}")
    return rows_of(out)


def disturbed(out: Path, seed: int) -> list[Row]:
    """Take a run to its end with all faults; returns after which step each came."""
    generator, faults = random.Random(seed), []
    names = generator.sample(list(TITLES), len(TITLES))
    child = started(out, seed)
    for number, name in enumerate(names):
        wait_for_steps(child, out, FIRST + number * APART + generator.randrange(APART - 1))
        time.sleep(generator.random())
        steps = len(rows_of(out)) - 1
        child = _killed(child, name, out=out, seed=seed)
        faults.append({"fault": name, "after_step": steps})
        note(f"seed {seed}: {name} killed after step {steps}")
    wait_until_over(child, out)
    return faults


def wait_for_steps(child: subprocess.Popen[bytes], out: Path, number: int) -> None:
    """Wait for steps of the run. RuntimeError if the run ends before."""
    deadline = time.monotonic() + LIMIT_S
    while len(rows_of(out)) <= number:
        if child.poll() is not None or time.monotonic() > deadline:
            wait_until_over(child, out)
            raise RuntimeError(f"the run was over before step {number}")
        time.sleep(POLL_S)


def _killed(child: subprocess.Popen[bytes], name: str, *, out: Path, seed: int) -> subprocess.Popen[bytes]:
    """Kill what has this name; returns the run's process, another one where it was the trainer."""
    family = pids_under(child.pid)
    if name == TRAINER:
        child.kill()
        child.wait()
        _wait_until_gone(family)
        return started(out, seed)
    victims = family if name == SERVER else pids_under(child.pid, TITLES[name])
    for pid in victims:
        if pid != child.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return child


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            raise RuntimeError("the server outlives its trainer")
        time.sleep(POLL_S)


def different_steps(one: list[Row], other: list[Row]) -> int:
    """Return the number of steps that differ or are in one run only; both begin with the policy before the first."""
    curves = [[tuple(row[name] for name in COMPARED) for row in rows[1:]] for rows in (one, other)]
    differ = sum(mine != theirs for mine, theirs in zip(*curves, strict=False))
    return differ + abs(len(curves[0]) - len(curves[1]))


def drift(one: list[Row], other: list[Row]) -> float:
    """Return the greatest difference of the held-out probability at a step of both."""
    return max(abs(mine["held_out"] - others["held_out"]) for mine, others in zip(one, other, strict=False))


def compare(directory: Path, seed: int) -> Row:
    """Compare the two runs of a seed."""
    alone, out = directory / f"undisturbed-{seed}", directory / f"disturbed-{seed}"
    kept = directory / f"disturbed-{seed}.json"
    if not kept.exists():
        wait_until_over(started(alone, seed), alone)
        began = time.monotonic()
        faults = disturbed(out, seed)
        kept.write_text(json.dumps({"faults": faults, "seconds": time.monotonic() - began}), encoding="utf-8")
    wanted, rows, known = rows_of(alone), rows_of(out), json.loads(kept.read_text(encoding="utf-8"))
    return {
        "seed": seed,
        "faults": known["faults"],
        "steps": len(rows) - 1,
        "in_order": [row["step"] for row in rows] == list(range(len(rows))),
        "differing_steps": different_steps(wanted, rows),
        "drift": drift(wanted, rows),
        "held_out": rows[-1]["held_out"],
        "seconds": known["seconds"],
    }


def main() -> None:
    """Run, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_training.json")
    options = parser.parse_args()
    load = load_before_start()
    rows = [compare(options.directory.resolve(), seed) for seed in options.seeds]
    save({"machine": machine_facts(load), "rows": rows}, options.out)
    headings = ["seed", "killed (after step)", "steps", "steps that differ", "P(sum)", "drift", "seconds"]
    table = [
        [
            row["seed"],
            ", ".join(f"{fault['fault']} ({fault['after_step']})" for fault in row["faults"]),
            f"{row['steps']}{'' if row['in_order'] else ', not in order'}",
            row["differing_steps"],
            f"{row['held_out']:.3f}",
            f"{row['drift']:.1e}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    print(markdown_table(headings, table))


if __name__ == "__main__":
    main()
