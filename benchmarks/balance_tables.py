"""What the result files about moving experts look like as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.figures import spread
from benchmarks.markdown import markdown_table

BASE = "counts, shares"
"""Planner that others are compared with."""
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


def expert_traffic(measured: Mapping[str, Any]) -> str:
    """By trace, group, batch and planner: ranks per token, bytes, hottest ranks, and changes of bytes."""
    rows: list[list[object]] = []
    for case in measured["cases"]:
        base = {each["batch"]: each for each in case["found"] if each["planner"] == BASE}
        for each in case["found"]:
            before = base[each["batch"]]
            rows.append([
                f"{case['trace']}, {case['ranks']} + {case['redundant']}",
                each["batch"],
                each["planner"],
                f"{each['distinct_ranks']:.2f}",
                f"{each['bytes_by_rank'] / 1024:.1f}",
                f"{each['bytes_by_rank'] / max(before['bytes_by_rank'], 1e-9) - 1:+.1%}",
                f"{each['bytes'] / 1024:.1f}",
                f"{each['bytes'] / max(before['bytes'], 1e-9) - 1:+.1%}",
                f"{each['hottest']:.3f}",
                f"{each['hottest_of_batch']:.2f}",
                f"{each['microseconds']:.1f}",
            ])  # fmt: skip
    heading = [
        "rows, ranks + redundant", "batch", "planner, slots", "ranks per token", "KiB, a row per rank", "change",
        "KiB, a row per expert", "change", "hottest / mean", "in a batch", "us, estimated",
    ]  # fmt: skip
    layers, experts, ranks, redundant = measured["plan"]["shape"]
    shape = f"{layers} layers of {experts} experts, {ranks} ranks, {redundant} redundant slots"
    time = f"A plan from rows for {shape}: {spread(measured['plan']['seconds'])} s of one core."
    text = [markdown_table(heading, rows), time]
    if loads := measured.get("loads"):
        found = [[name, each["cases"], f"{each['even']:.4f}", f"{each['shares']:.4f}"] for name, each in loads.items()]
        text.append(markdown_table(["hottest rank / bound, from counts", "cases", "even", "shares"], found))
    return "\n\n".join(text)


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
