"""What the result files about moving experts look like as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.figures import spread
from benchmarks.markdown import markdown_table

REBALANCE_TITLES = {
    "some": "to the load of another window, from where experts lie",
    "all": "to a plan that ignores where experts lie",
}


def rebalance(measured: Mapping[str, Any]) -> str:
    """Speed of steps while experts move against the quiet ones around, and the longest gap between steps."""
    rows = [
        [
            REBALANCE_TITLES[name],
            spread(run["slots"] for run in runs),
            spread(run["steps"] for run in runs),
            spread(1e3 * run["quiet_step_s"] for run in runs),
            spread(run["quiet_step_s"] / run["busy_step_s"] for run in runs),
            spread(run["longest_gap"] for run in runs),
            spread(run["longest_quiet_gap"] for run in runs),
        ]
        for name, runs in measured["runs"].items()
    ]
    title = "{layers} layers, {experts} + {redundant} slots, {devices} devices, {slots_per_step} slots a step".format(
        **measured
    )
    heading = [title, "slots moved", "steps", "quiet step, ms", "tokens/s, rebalancing / quiet"]
    return markdown_table([*heading, "longest gap / median step", "the same, quiet"], rows)


def realised_balance(measured: Mapping[str, Any]) -> str:
    """The hottest rank over the mean, as counted in the steps and as planned."""
    rows = []
    for name, phase in measured["phases"].items():
        pairs = list(zip(phase["realised"], phase["promised"], strict=True))
        off = [abs(found / said - 1) for found, said in pairs]
        both = [f"{statistics.fmean(values):.4f} ({max(values):.4f})" for values in zip(*pairs, strict=True)]
        rows.append([name, f"{phase['tokens']:,}", *both, f"{statistics.fmean(off):.2%} ({max(off):.2%})"])
    heading = [
        f"{measured['devices']} ranks, mean of layers (worst)",
        "tokens a layer",
        "realised",
        "promised",
        "off by",
    ]
    return markdown_table(heading, rows)
