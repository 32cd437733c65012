"""What the calculator's answers and steps look like as tables, by what computed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures import milliseconds_per_step, rate, speed_ratio, spread
from benchmarks.markdown import markdown_table

COMPUTED_BY = {"native": ("native", "bfloat16"), "bfloat16": ("XLA", "bfloat16"), "float32": ("XLA", "float32")}
"""Kernels and dtype of a side."""
SUMS = "sums"
"""How the tasks begin that only add."""


def calculator(measured: Mapping[str, Any]) -> str:
    """Render one row for each side, then right answers by task and side and those that are float32's own."""
    return f"{_sides(measured)}\n\n{_tasks(measured)}"


def _sides(measured: Mapping[str, Any]) -> str:
    """Render the step of each side, and its answers to sums and to all problems."""
    runs, every = measured["runs"], list(measured["tasks"].values())
    sums = [task for name, task in measured["tasks"].items() if name.startswith(SUMS)]
    heading = ["kernels", "dtype", "ms per step", "waiting for the device, ms", "answers/s", "of float32"]
    for what, tasks in (("sums", sums), ("problems", every)):
        number = sum(task["problems"] for task in tasks)
        heading += [f"held-out {what} right of {number:,}", f"{what} unlike float32"]
    number = sum(task["problems"] for task in every)
    rows = [
        [
            *COMPUTED_BY[side],
            spread(1e3 * run["seconds"] / run["steps"] for run in each),
            milliseconds_per_step(each, ["device"]),
            rate(number, each),
            speed_ratio(each, runs["float32"]) if side != "float32" else "",
            *(cell for tasks in (sums, every) for cell in _answers(side, tasks)),
        ]
        for side, each in runs.items()
    ]
    return markdown_table(heading, rows)


def _answers(side: str, tasks: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return how many answers are right, and how many differ from float32's."""
    others = sum(task["problems"] - task["same"][side] for task in tasks)
    return f"{sum(task['right'][side] for task in tasks):,}", f"{others:,}" if side != "float32" else ""


def _tasks(measured: Mapping[str, Any]) -> str:
    """Render shares of right answers, and of those that are float32's own."""
    titles = {side: ", ".join(COMPUTED_BY[side]) for side in measured["runs"]}
    others = [side for side in titles if side != "float32"]
    rows = [
        [
            name,
            task["problems"],
            *(f"{task['right'][side] / task['problems']:.1%}" for side in titles),
            *(f"{task['same'][side] / task['problems']:.1%}" for side in others),
        ]
        for name, task in measured["tasks"].items()
    ]
    right = [f"right, {title}" for title in titles.values()]
    same = [f"as float32, {titles[side]}" for side in others]
    return markdown_table(["held-out problems", "number", *right, *same], rows)
