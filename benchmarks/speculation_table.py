"""What speed and acceptance of drafts look like as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures import Spread, paired_ratio
from benchmarks.markdown import markdown_table

Runs = Sequence[Mapping[str, Any]]


def speculation(measured: Mapping[str, Mapping[str, Runs]]) -> str:
    """Render a row for each number of streams and share of right drafts."""
    rows, numbers = [], [side for side in next(iter(measured.values())) if side.isdigit()]
    for name, sides in sorted(measured.items(), key=lambda each: [float(part) for part in each[0].split(", ")]):
        streams, share = name.split(", ")
        chosen, plain = sides["chosen"], sides["plain"]
        fixed = [f"{_ratio(sides[side][:1], plain[:1]).median:.2f}" for side in sorted(numbers)]
        bound = paired_ratio(*([run["bound_seconds"] / run["seconds"] for run in runs] for runs in (chosen, plain)))
        usual = max(chosen[0]["drafts_of_steps"].items(), key=lambda each: each[1])[0]
        rows.append(
            [
                streams,
                share,
                *fixed,
                usual,
                f"{_length(chosen):.2f}",
                _ratio(chosen, plain),
                f"{bound.median:.2f} ({bound.least:.2f}-{bound.greatest:.2f})",
            ]
        )
    heading = ["streams", "drafts right", *(f"{most} drafts / plain" for most in sorted(numbers)), "chosen most often"]
    heading += ["tokens a verification", "chosen / plain", "of the bound"]
    return markdown_table(heading, rows)


def _ratio(sides: Runs, plain: Runs) -> Spread:
    """Return tokens per second against plain ones, by repeat."""
    return paired_ratio(*([run["tokens"] / run["seconds"] for run in runs] for runs in (sides, plain)))


def _length(runs: Runs) -> float:
    """Return tokens that verified chains gave."""
    chains = sum(run["chains"] for run in runs)
    return 1 + sum(run["accepted"] for run in runs) / chains if chains else 1.0


def speculation_calculator(measured: Mapping[str, Mapping[str, Runs]]) -> str:
    """Render a row for each load and side."""
    rows = []
    for load, sides in measured.items():
        for side, runs in sides.items():
            plain = [{**run, "seconds": run["plain_seconds"]} for run in runs]
            rows.append([load, side, f"{_length(runs):.2f}", _ratio(runs, plain)])
    return markdown_table(["load", "drafts", "tokens a verification", "tokens/s against plain steps"], rows)
