"""What the calculator's answers and steps look like as tables, by what computed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import milliseconds_per_step, rate, speed_ratio, spread
from benchmarks.markdown import markdown_table

TITLES = {"native": "bfloat16, native kernels", "bfloat16": "bfloat16 by XLA", "float32": "float32 by XLA"}


def calculator(measured: Mapping[str, Any]) -> str:
    """Right answers by task and side, those that are float32's own, and the time of a step."""
    tasks, runs = measured["tasks"], measured["runs"]
    rows = [
        [
            name,
            task["problems"],
            *(f"{task['right'][side] / task['problems']:.1%}" for side in runs),
            *(f"{task['same'][side] / task['problems']:.1%}" for side in runs if side != "float32"),
        ]
        for name, task in tasks.items()
    ]
    right = [f"right, {TITLES[side]}" for side in runs]
    same = [f"as float32, {TITLES[side]}" for side in runs if side != "float32"]
    answers = sum(task["problems"] for task in tasks.values())
    times = [
        [
            TITLES[side],
            spread(1e3 * run["seconds"] / run["steps"] for run in each),
            milliseconds_per_step(each, ["device"]),
            rate(answers, each),
            speed_ratio(each, runs["float32"]) if side != "float32" else "",
        ]
        for side, each in runs.items()
    ]
    speeds = markdown_table(
        ["computed by", "ms per step", "of it waiting for the device", "answers/s", "of float32"], times
    )
    return f"{markdown_table(['held-out problems', 'number', *right, *same], rows)}\n\n{speeds}"
