"""Whole models, compiled for whole TPU slices: what the sizes in the contract are checked by.

    python -m benchmarks.compile_gate [--only qwen3-30b-a3b@v6e:2x4] [--only qwen3-30b-a3b@v6e:2x4+32] [--out FILE.json]

Each model and topology is checked by `rayserve-moe compile-check` in a process of its own; a run takes minutes per
program on two cores and needs no TPU. Ends with 1 where a case does not fit, copies weights or KV, or does not update
its state in place.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.table import tables

CASES: dict[str, tuple[str, ...]] = {
    "qwen3-30b-a3b@v6e:2x4": ("--expert-backend", "all_to_all"),
    "qwen3-30b-a3b@v5e:4x4": ("--expert-backend", "all_to_all"),
    "qwen3-235b-a22b@v5p:2x4x4": ("--expert-backend", "all_to_all"),
    "qwen3-235b-a22b@v6e:8x8": ("--expert-backend", "all_to_all", "--dp", "32", "--tp", "2"),
    "qwen3-30b-a3b@v6e:2x4+32": ("--expert-backend", "all_to_all"),
    "qwen3-30b-a3b@v6e:2x4+128": ("--expert-backend", "all_to_all"),
    "qwen3-235b-a22b@v5p:2x4x4+32": ("--expert-backend", "all_to_all"),
    "qwen3-235b-a22b@v5p:2x4x4+128": ("--expert-backend", "all_to_all"),
}
"""Model, topology and redundant experts, and what differs from 16 sequences of 4096 tokens on as many data ranks as
devices."""

KEY = "compile_gate"
RESULTS = Path(__file__).parent / "results"


def check(case: str) -> dict[str, Any]:
    """Compile one case; returns the report, with the exit status."""
    model, slice_and_more = case.split("@")
    topology, _, redundant = slice_and_more.partition("+")
    command = [sys.executable, "-m", "rayserve_moe.cli", "compile-check", "--model", model, "--topology", topology]
    options = [*CASES[case], "--redundant-experts", redundant or "0", "--json"]
    run = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if not run.stdout.strip():
        raise RuntimeError(f"{case}: {run.stderr.strip().splitlines()[-1] if run.stderr.strip() else 'no report'}")
    return {"status": run.returncode, **json.loads(run.stdout)}


def faults(report: dict[str, Any]) -> list[str]:
    """What keeps a case from being served, program by program."""
    found = []
    for program in report["programs"]:
        name = program["name"]
        if program["error"]:
            found.append(f"{name} does not compile: {program['error']}")
            continue
        found += [f"{name} copies {size / 1e6:.1f} MB of {kind}" for kind, size in program["copied_bytes"].items()]
        if not program["is_in_place"]:
            found.append(f"{name} does not update its state in place")
    return found


def main() -> int:
    """Check every case, writing the result file after each; then print its table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CASES), action="append", help="may be given more than once")
    parser.add_argument("--out", type=Path, default=RESULTS / "compile_gate.json")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {KEY: {}}
    status = 0
    for case in arguments.only or CASES:
        known[KEY][case] = check(case)
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        found = faults(known[KEY][case])
        status = 1 if found else status
        print(case, "; ".join(found) or "fits", flush=True)
    print(tables(known))
    return status


if __name__ == "__main__":
    sys.exit(main())
