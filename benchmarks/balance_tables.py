"""What the result files about moving experts look like as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.figures import spread
from benchmarks.markdown import markdown_table

BASE = "counts, shares"
"""Planner that others are compared with, by the same exchange."""
REBALANCE_TITLES = {
    "some": "to the load of another window, from where experts lie",
    "all": "to a plan that ignores where experts lie",
}


def rebalance(measured: Mapping[str, Any]) -> str:
    """Render speed of steps while experts move against the quiet ones around, and the longest gap between steps."""
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
    """Render ranks per token, bytes, changes at every batch, hottest rank and time by trace, group and planner."""
    batches = sorted({each["batch"] for case in measured["cases"] for each in case["found"]})
    middle = batches[min(1, len(batches) - 1)]
    rows: list[list[object]] = []
    for case in measured["cases"]:
        found = {(each["planner"], each["batch"]): each for each in case["found"]}
        for planner in dict.fromkeys(name for name, _ in found):
            each = [found[planner, batch] for batch in batches]
            before = [max(found[BASE, batch]["bytes"], 1e-9) for batch in batches]
            at_middle = found[planner, middle]
            rows.append([
                f"{case['trace']}, {case['ranks']} + {case['redundant']}, {case['slices']}",
                planner,
                *(f"{one['distinct_ranks']:.2f}" for one in each),
                *(f"{one['bytes'] / 1024:.1f}" for one in each),
                *(f"{one['bytes'] / base - 1:+.1%}" for one, base in zip(each, before, strict=True)),
                f"{at_middle['bytes_between_slices'] / 1024:.1f}",
                f"{at_middle['hottest']:.3f}",
                *(f"{one['microseconds']:.1f}" for one in each[: batches.index(middle) + 1]),
            ])  # fmt: skip
    at = [f"at {batch:,}" for batch in batches]
    heading = [
        "rows, ranks + redundant, slices",
        "planner, slots",
        *(f"{name} {each}" for name in ("ranks per token", "KiB", "change") for each in at),
        f"KiB between slices at {middle}",
        f"hottest / mean at {middle}",
        *(f"us at {batch}, estimated" for batch in batches[: batches.index(middle) + 1]),
    ]
    layers, experts, ranks, redundant = measured["plan"]["shape"]
    shape = f"{layers} layers of {experts} experts, {ranks} ranks, {redundant} redundant slots"
    time = f"A plan from rows for {shape}: {spread(measured['plan']['seconds'])} s of one core."
    text = [markdown_table(heading, rows), time]
    if loads := measured.get("loads"):
        found = [[name, each["cases"], f"{each['even']:.4f}", f"{each['shares']:.4f}"] for name, each in loads.items()]
        text.append(markdown_table(["hottest rank / bound, from counts", "cases", "even", "shares"], found))
    return "\n\n".join(text)


def realised_balance(measured: Mapping[str, Any]) -> str:
    """Render the hottest rank over the mean, as counted in the steps and as planned."""
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
