"""Draws a run, or several beside each other, as one page of panels: PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots import STYLES

Rows = Sequence[Mapping[str, Any]]
Line = Callable[[Mapping[str, Any]], float | None]


class Panel(NamedTuple):
    """One set of axes: what its lines are named, and how each is read off a row (None: nothing at that step)."""

    title: str
    lines: Mapping[str, Line]
    is_log: bool = False
    is_share: bool = False
    """From 0 to 1, so that a constant is one."""


def _of(name: str) -> Line:
    return lambda row: row.get(name)


def _of_probe(name: str) -> Line:
    return lambda row: row.get("probe", {}).get(name)


PANELS = (
    Panel("reward", {"sampled": _of("reward")}),
    Panel("held-out probability of the sum", {"exact": _of("held_out")}),
    Panel("other tasks, greedy", {"- of 1-2 digits": _of("differences"), "+ of 3 digits": _of("sums")}),
    Panel(
        "KL on the probe set, nats per token",
        {"replayed": _of_probe("kl_replayed"), "free": _of_probe("kl_free")},
        is_log=True,
    ),
    Panel("KL in the run, nats per token", {"as trained": _of("kl")}, is_log=True),
    Panel("share of tokens", {"clipped": _of("clip"), "above the TIS cap": _of("tis")}, is_share=True),
    Panel("routing agreement", {"trainer's own choice": _of("agreement")}),
    Panel("dead groups", {"share": _of("dead")}, is_share=True),
    Panel(
        "sampled tokens per second",
        {"of the whole step": lambda row: row["tokens"] / row["seconds"]["whole"] if "seconds" in row else None},
    ),
)


def draw(runs: Mapping[str, Rows], *, title: str, file: Path) -> None:
    """Draw runs by name into `file`, as .png and .svg. Of several runs, only the first line of a panel."""
    with mpl.rc_context({"svg.hashsalt": "rayserve_moe", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(12, 9), layout="constrained")
        figure.suptitle(title)
        for axes, panel in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
            _draw_panel(axes, panel, runs)
        figure.savefig(file.with_suffix(".png"), dpi=110)
        figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})


def _draw_panel(axes: Axes, panel: Panel, runs: Mapping[str, Rows]) -> None:
    lines = panel.lines if len(runs) == 1 else dict(list(panel.lines.items())[:1])
    named = ((name, label, line) for name in runs for label, line in lines.items())
    for number, (name, label, line) in enumerate(named):
        colour, dash, _ = STYLES[number % len(STYLES)]
        points = [(row["step"], line(row)) for row in runs[name] if line(row) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=dash, label=label if len(runs) == 1 else name)
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel("step")
    axes.set_yscale("log" if panel.is_log and axes.lines else "linear")
    if panel.is_share:
        axes.set_ylim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False)
