"""What drawing samples while the trainer works gains, from two runs of the GRPO example with a core for each side.

    python -m examples.grpo --out SYNC --one-core-each --steps 25 --dtype float32
    python -m examples.grpo --out ASYNC --one-core-each --steps 25 --dtype float32 --asynchronous
    python -m benchmarks.grpo_overlap SYNC ASYNC [--out FILE.json]

A synchronous step samples, trains and pushes, one after the other; an asynchronous one can take the longer of the first
two, and the push. The bound follows from the medians of the synchronous run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, save
from benchmarks.markdown import markdown_table

UNCOUNTED = 3
"""First steps of a run, in which programs are compiled or read."""


def parts_of(run: Path) -> dict[str, float]:
    """Return medians over the steps of a run: seconds of the step, of sampling, training and pushing; and its batch."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows[1 + UNCOUNTED :] if "probe" not in row]
    each = {name: [row["seconds"][name] for row in steps] for name in ("whole", "sample", "push")}
    each["train"] = [row["seconds"]["train"] + row["seconds"]["evaluate"] for row in steps]
    found = {name: statistics.median(values) for name, values in each.items()}
    tokens = statistics.median(row["tokens"] for row in steps)
    return {**found, "tokens": tokens, "steps": len(steps), "staleness": max(row["staleness"] for row in steps)}


def main() -> None:
    """Compare, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="the synchronous one, then the other")
    parser.add_argument("--out", type=Path, default=RESULTS / "grpo_overlap.json")
    arguments = parser.parse_args()
    settings = json.loads((arguments.runs[0] / "settings.json").read_text(encoding="utf-8"))
    runs = dict(zip(("synchronous", "asynchronous"), map(parts_of, arguments.runs), strict=True))
    alone = runs["synchronous"]
    bound = (alone["sample"] + alone["train"] + alone["push"]) / (max(alone["sample"], alone["train"]) + alone["push"])
    gain = alone["whole"] / runs["asynchronous"]["whole"]
    result: dict[str, Any] = {"machine": machine_facts(load_before_start()), "settings": settings, "runs": runs}
    result |= {"bound": bound, "gain": gain, "share": gain / bound}
    save(result, arguments.out)
    names = ("whole", "sample", "train", "push")
    table = [[name, *(f"{run[part]:.2f}" for part in names), int(run["staleness"])] for name, run in runs.items()]
    print(markdown_table(["loop", *(f"{name}, s" for name in names), "staleness"], table))
    print(f"\n{gain:.2f} times as fast, of at most {bound:.2f}: {gain / bound:.2f} of the bound")


if __name__ == "__main__":
    main()
