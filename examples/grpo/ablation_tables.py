"""Several runs of each arm as tables: what was learnt and forgotten, and which wrong rows the guard would refuse."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import markdown_table

Row = dict[str, Any]
LEARNT = 0.9
LAST = ("reward", "held_out", "differences", "sums")
Runs = Mapping[str, Sequence[Sequence[Row]]]
"""By arm: the rows of every seed's run."""


def mean_rows(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """A row per step that all runs have taken, with the mean of every number that all of them have there."""
    return [
        {
            name: statistics.fmean(row[name] for row in rows)
            for name, value in rows[0].items()
            if isinstance(value, int | float) and all(name in row for row in rows)
        }
        for rows in zip(*runs, strict=False)
    ]


def tables(runs: Runs, *, max_kl: float) -> str:
    """What each arm has learnt and forgotten, and what the guard sees of wrong rows in the right arm's batches."""
    heading = [
        "arm",
        "seeds",
        "steps",
        f"to P(sum) > {LEARNT}",
        "reward",
        "P(sum)",
        "-",
        "+",
        "KL in the run",
        "refused",
    ]
    arms = [[name, len(of_arm), *_arm(of_arm)] for name, of_arm in runs.items() if of_arm]
    batches = [row for rows in runs["replay"] for row in rows[1:]]
    names = {name: None for row in batches for name in row["controls"]}
    controls = [
        [name, *_control([row["controls"][name] for row in batches if name in row["controls"]], max_kl)]
        for name in names
    ]
    controls.insert(0, ["as served", *_control([row["kl"] for row in batches], max_kl)])
    caught = markdown_table(["rows", "batches", "least KL", "median", "greatest", f"above {max_kl:g}"], controls)
    return f"{markdown_table(heading, arms)}\n\n{caught}"


def _arm(runs: Sequence[Sequence[Row]]) -> list[str]:
    """Medians over the seeds, of the last row of each run where nothing else is said."""
    last = {name: statistics.median(rows[-1][name] for rows in runs) for name in LAST}
    learnt = [next((row["step"] for row in rows if row["held_out"] > LEARNT), None) for rows in runs]
    reached = sorted(step for step in learnt if step is not None)
    steps = f"{statistics.median(reached):g} ({len(reached)} of {len(runs)})" if reached else "never"
    batches = [row for rows in runs for row in rows[1:]]
    kl = statistics.fmean(row["kl"] for row in batches)
    refused = statistics.fmean(bool(row["refused"]) for row in batches)
    taken = statistics.median(rows[-1]["step"] for rows in runs)
    return [f"{taken:g}", steps, *(f"{value:.3f}" for value in last.values()), f"{kl:.1e}", f"{refused:.0%}"]


def _control(distances: Sequence[float], max_kl: float) -> list[str]:
    caught = statistics.fmean(distance > max_kl for distance in distances)
    each = (min(distances), statistics.median(distances), max(distances))
    return [str(len(distances)), *(f"{distance:.1e}" for distance in each), f"{caught:.0%}"]
