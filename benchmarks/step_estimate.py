"""Step times estimated from the schedules that libtpu writes for a whole model: no TPU is needed, nothing is measured.

    python -m benchmarks.step_estimate [--only "decode, 16 sequences"] [--out FILE.json]

Each case is compiled by `rayserve-moe compile-check --estimate` in a process of its own, which takes one to three
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.table import tables

MODEL, TOPOLOGY, CONTEXT = "qwen3-30b-a3b", "v6e:2x4", 1024
CASES: dict[str, tuple[str, int, int]] = {
    "decode, 16 sequences": ("decode_2", 2, 48),
    "decode, 128 sequences": ("decode_16", 16, 48),
    "decode, 256 sequences": ("decode_32", 32, 48),
    "decode, 1024 sequences": ("decode_128", 128, 48),
    "prefill, 65536 tokens": ("prefill_8192", 16, 3),
}
"""Program, sequences per data rank, layers that are compiled. A prefill step has 8192 prompt tokens per data rank too;
its tables of experts are as small as its layers are few, which is 2 % of the step.
"""

KEY = "step_estimate"
NUM_KEPT = 10
"""Ops of a layer, and of the rest, that the result file keeps: those that cost most."""
RESULTS = Path(__file__).parent / "results"


def run(case: str) -> dict[str, Any]:
    """Compile one case; returns the estimate. RuntimeError with the last line of the error where there is none."""
    program, batch, layers = CASES[case]
    command = [sys.executable, "-m", "rayserve_moe.cli", "compile-check", "--model", MODEL, "--topology", TOPOLOGY]
    sizes = ["--context", str(CONTEXT), "--batch", str(batch), "--prefill-tokens", "8192", "--page-size", "128"]
    options = ["--programs", program, "--layers", str(layers), "--estimate", "--json"]
    done = subprocess.run([*command, *sizes, *options], capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{case}: {(done.stderr.strip() or 'no report').splitlines()[-1]}")
    (found,) = json.loads(done.stdout)["programs"]
    if found["error"]:
        raise RuntimeError(f"{case}: {found['error']}")
    estimate = found["estimate"]
    return estimate | {name: estimate[name][:NUM_KEPT] for name in ("ops_in_layer", "ops_outside")}


def main() -> None:
    """Estimate every case, writing the result file after each; then print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CASES), action="append", help="may be given more than once")
    parser.add_argument("--out", type=Path, default=RESULTS / "step_estimate.json")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {KEY: {}}
    for case in arguments.only or CASES:
        known[KEY][case] = run(case)
        arguments.out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(tables(known))


if __name__ == "__main__":
    main()
