"""Markdown tables from result files: `python -m benchmarks.table benchmarks/results/*.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import OUTSIDE, PARTS, rate, speed_ratio, step_parts, steps_per_second
from benchmarks.workloads import Workload


def main() -> None:
    """Print the tables of every file named on the command line."""
    print("\n\n".join(tables(json.loads(Path(name).read_text(encoding="utf-8"))) for name in sys.argv[1:]))


def tables(result: dict[str, Any]) -> str:
    """Render one result: what ran where, rates beside transformers', and where a step's time goes."""
    return "\n\n".join([_conditions(result), _rates(result), _steps(result)])


def _conditions(result: dict[str, Any]) -> str:
    machine, theirs = result["machine"], result["theirs"]
    versions = machine["versions"]
    peer = "transformers was not run"
    if theirs:
        peer = (
            f"transformers {versions['transformers']} `generate` in {theirs['dtype']} "
            f"({theirs['experts']}, {theirs['threads']} threads, torch {versions['torch']})"
        )
    return (
        f"`{result['size']}` synthetic checkpoint ({result['num_parameters'] / 1e6:,.0f} M parameters), "
        f"{machine['cpu']}, {machine['cores']} cores; ours computes in {result['ours']['dtype']} on "
        f"{result['ours']['devices']} {machine['device']} devices (jax {versions['jax']}); {peer}. "
        f"Medians of {result['repeats']} repeats (min-max); "
        f"load average before the start {machine['load_before']:.1f}."
    )


def _rates(result: dict[str, Any]) -> str:
    rows = []
    for name, measured in result["workloads"].items():
        workload, ours, theirs = Workload(**measured["workload"]), measured["ours"], measured["theirs"]
        row = [name, str(workload), rate(workload.total_new_tokens, ours), rate(workload.total_prompt_tokens, ours)]
        if theirs:
            row += [rate(workload.total_new_tokens, theirs), speed_ratio(ours, theirs)]
        rows.append(row)
    heading = ["", "workload", "output tokens/s", "prompt tokens/s"]
    return _table(heading + ["transformers, output tokens/s", "ours / theirs"] * bool(result["theirs"]), rows)


def _steps(result: dict[str, Any]) -> str:
    rows = []
    for name, measured in result["workloads"].items():
        parts = step_parts(measured["ours"])
        cells = [f"{milliseconds:.2f} ({share:.1%})" for milliseconds, share in parts.values()]
        rows.append([name, steps_per_second(measured["ours"]), *cells])
    return _table(["", "steps/s", *(f"{part}, ms per step" for part in (*PARTS, OUTSIDE))], rows)


def _table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [list(heading), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
