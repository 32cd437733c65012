"""Draws the charts of result files: those named, beside them, or all that are kept in benchmarks/results, into
docs/figures.

python -m benchmarks.plots [benchmarks/results/curve.json ...]      with matplotlib: pip install -e '.[bench]'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.chart import Chart, Series
from benchmarks.charts import charts

RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).resolve().parents[1] / "docs" / "figures"
STYLES = (
    ("#0072b2", "-", "o"),
    ("#d55e00", "--", "s"),
    ("#009e73", ":", "^"),
    ("#cc79a7", "-.", "D"),
    ("#7a6000", "--", "v"),
)
"""Colour, dash and marker of each line, told apart under the common kinds of colour blindness, and in print."""


def main() -> None:
    """Draw, and name every file written."""
    for file in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(RESULTS.glob("*.json")):
        for suffix, chart in charts(json.loads(file.read_text(encoding="utf-8"))).items():
            folder = PAGES if file.resolve().parent == RESULTS.resolve() else file.parent
            out = folder / f"{file.stem}-{suffix}.svg"
            draw(chart, out)
            print(out)


def draw(chart: Chart, out: Path) -> None:
    """Draw one chart as SVG, the same bytes from the same figures; a bar goes from least to greatest."""
    with mpl.rc_context({"svg.hashsalt": "rayserve_moe", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for style, series in zip(STYLES, chart.series, strict=False):
            _line(axes, series, style)
        _axes(axes, chart)
        described = f"{chart.y_label} by {chart.x_label}: {', '.join(each.name for each in chart.series)}"
        metadata = {"Title": chart.title, "Description": described, "Identifier": chart.fingerprint, "Date": None}
        figure.savefig(out, metadata=metadata)


def _line(axes: Axes, series: Series, style: tuple[str, str, str]) -> None:
    colour, dash, marker = style
    numbers = [number for number, _ in series.points]
    medians = [value.median for _, value in series.points]
    below = [value.median - value.least for _, value in series.points]
    above = [value.greatest - value.median for _, value in series.points]
    axes.errorbar(
        numbers,
        medians,
        yerr=(below, above),
        label=series.name,
        color=colour,
        linestyle=dash,
        marker=marker,
        markersize=5,
        capsize=3,
    )


def _axes(axes: Axes, chart: Chart) -> None:
    axes.set_title(f"{chart.title}\n({chart.note})" if chart.note else chart.title, loc="left", fontsize=11)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y", color="#d8dee4")
    axes.spines[["top", "right"]].set_visible(False)
    if chart.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(sorted({number for each in chart.series for number, _ in each.points}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_xlim(left=0)
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
