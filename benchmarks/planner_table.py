"""The planner's figures as tables, beside what is to be reached and the best that others publish."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import markdown_table

MOVED_TARGETS = {
    "30B ep8 R32": ("0.82", 0.04),
    "V3 ep32 R32": ("0.96", 0.12),
    "K2 ep64 R64": ("0.98", 0.16),
    "235B ep32 R32": ("0.95", 0.25),
}
REALISED_TARGETS = {"lognormal": ("1.02-1.07", 1.005), "hot": ("1.9-6.7", 1.05)}
TIMED = "K2 ep64 R64"


def planner(measured: Mapping[str, Any]) -> str:
    """Render the bound to reach, then all cases by skew, then drifting loads, then times."""
    parts = (_targets(measured), _groups(measured["quality"]), _drifts(measured["drift"]), _times(measured["seconds"]))
    before = f"Load average of the machine before the start: {measured['load_before']}."
    return "\n\n".join((*parts, before))


def _targets(measured: Mapping[str, Any]) -> str:
    groups, readme, quality = measured["quality"]["groups"], measured["readme"], measured["quality"]
    everything, unreplicated = groups["all"], groups["R = 0"]
    cases, duplicates = everything["cases"], everything["duplicates"]
    rows: list[list[object]] = [
        _bounded(f"hottest rank / bound, equal shares, {cases} cases", "1.0223", everything, "<= 1.006"),
        ["the same with planned shares", "", "", "", _ratio(everything["shares"])],
        _bounded("equal shares, R = 0", "", unreplicated, "<= 1.003"),
        ["replicas beside another on one rank", "thousands", duplicates["greedy"], "0", duplicates["planned"]],
        _bounded("README example, equal shares", "1.1218", readme, "<= 1.122"),
        ["the same with planned shares", "", "", "", _ratio(readme["shares"])],
    ]
    for skew, (published, target) in REALISED_TARGETS.items():
        if found := quality["realised"].get(skew):
            reached = f"{_ratio(found['mean'])} (worst layer {_ratio(found['worst_layer'])})"
            rows.append([f"hottest / mean rank with shares, {skew}", published, "", f"<= {target}", reached])
    for name, (published, target) in MOVED_TARGETS.items():
        if found := measured["drift"].get(name):
            rows.append([f"moved / all slots, {name}", published, "", f"<= {target}", f"{found['moved']:.4f}"])
    if timed := measured["seconds"].get(TIMED):
        greedy = f"{statistics.median(timed['greedy_ms']):.0f} ms"
        rows.append([f"first placement, {TIMED}", "60-138 ms", greedy, "<= 15 ms", _spread(timed["first_ms"])])
        rows.append([f"with search, {TIMED}", "", "", "<= 1000 ms", _spread(timed["plan_ms"])])
        rows.append(["incremental plan, the same", "", "", "<= 300 ms", _spread(measured["drift"][TIMED]["ms"])])
    return markdown_table(["figure", "best published", "greedy baseline here", "goal", "ours"], rows)


def _bounded(title: str, published: str, found: Mapping[str, Any], target: str) -> list[object]:
    return [title, published, _ratio(found["greedy"]), target, _ratio(found["even"])]


def _groups(quality: Mapping[str, Any]) -> str:
    names = ("greedy", "first", "even", "shares", "worst_even")
    rows = [[name, each["cases"], *(_ratio(each[key]) for key in names)] for name, each in quality["groups"].items()]
    heading = ["hottest rank / bound", "cases", "greedy", "first placement", "equal shares", "planned shares"]
    return markdown_table([*heading, "worst case, equal shares"], rows)


def _drifts(drifts: Mapping[str, Any]) -> str:
    rows = [
        [name, *(_ratio(each[key]) for key in ("stale", "after", "worst_layer", "even", "moved", "most_moved"))]
        for name, each in drifts.items()
    ]
    heading = ["drifting load, hottest rank / bound", "before", "after", "worst layer", "with equal shares"]
    return markdown_table([*heading, "moved / slots", "most in one plan"], rows)


def _times(timed: Mapping[str, Any]) -> str:
    rows = [
        [name, _spread(each["first_ms"]), _ratio(each["ratio"]), _spread(each["plan_ms"]), _spread(each["greedy_ms"])]
        for name, each in timed.items()
    ]
    return markdown_table(["all layers in one call", "first placement", "of the bound", "with search", "greedy"], rows)


def _ratio(value: float) -> str:
    return f"{value:.4f}"


def _spread(milliseconds: Sequence[float]) -> str:
    least, most = min(milliseconds), max(milliseconds)
    return f"{statistics.median(milliseconds):.1f} ms ({least:.1f}-{most:.1f})"
