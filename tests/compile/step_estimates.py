"""Estimates of whole models' decode steps on every chip, and the baseline that they are held to.

    python -m tests.compile.step_estimates [CASE ...]

writes the baseline of the cases, or of all of them, anew: after a change that is meant.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).with_name("step_estimates.json")
MODEL, CONTEXT = "qwen3-30b-a3b", 1024
CASES = {
    "v5e:4x4, 16 per rank": ("v5e:4x4", 16),
    "v5p:2x2x2, 16 per rank": ("v5p:2x2x2", 16),
    "tpu7x:2x2x1, 16 per rank": ("tpu7x:2x2x1", 16),
    "v6e:2x4, 2 per rank": ("v6e:2x4", 2),
    "v6e:2x4, 128 per rank": ("v6e:2x4", 128),
    "v6e:2x4, 32 per rank, int8": ("v6e:2x4", 32),
}
"""Topology, sequences per data rank, in pages of 128; `int8` are experts in int8. All layers are compiled: what grows
with them is part of the estimate."""


def figures_of(case: str) -> dict[str, float]:
    """Compile a case in a process of its own, which loads libtpu anew; returns what is held to the baseline."""
    topology, batch = CASES[case]
    command = [sys.executable, "-m", "rayserve_moe.cli", "compile-check", "--model", MODEL, "--topology", topology]
    options = ["--context", str(CONTEXT), "--batch", str(batch), "--page-size", "128"]
    wanted = ["--programs", f"decode_{batch}", "--estimate", "--json"]
    wanted += ["--expert-dtype", "int8" if case.endswith("int8") else "auto"]
    done = subprocess.run([*command, *options, *wanted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["programs"]
    return held(report["estimate"])


def held(estimate: dict[str, Any]) -> dict[str, float]:
    """The figures of an estimate that a baseline has: times at the peaks of the specification."""
    layer, step = estimate["layer"], estimate["step"]
    figures = {
        "ops of a layer": layer["num_ops"],
        "bundles of a layer": layer["bundles"],
        "HBM MB of a layer": layer["hbm_bytes"] / 1e6,
        "us of a layer": layer["peak_seconds"] * 1e6,
        "us of a step": step["peak_seconds"] * 1e6,
    }
    return {name: round(value, 2) for name, value in figures.items()}


def baseline() -> dict[str, dict[str, float]]:
    """The committed figures by case."""
    return json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}


def main() -> None:
    """Write the baseline of the named cases, or of all."""
    known = baseline()
    for case in sys.argv[1:] or CASES:
        known[case] = figures_of(case)
        BASELINE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
