"""Draws the charts of result files: those named, or all that are kept in benchmarks/results, into files beside them.

python -m benchmarks.plots [benchmarks/results/curve.json ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import Axes, Series, line_chart
from benchmarks.figures import HOST_PARTS, Run, Spread, milliseconds_per_step, spread
from benchmarks.peers.tables import peers_chart

RESULTS = Path(__file__).parent / "results"
RUNNING = "running sequences"


def main() -> None:
    """Draw, and name every file written."""
    for file in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(RESULTS.glob("*.json")):
        for suffix, svg in charts(json.loads(file.read_text(encoding="utf-8"))).items():
            out = file.with_name(f"{file.stem}-{suffix}.svg")
            out.write_text(svg, encoding="utf-8")
            print(out)


def charts(result: dict[str, Any]) -> dict[str, str]:
    """The charts of one result, by the ending of their file names; none where it has nothing to draw."""
    return {suffix: svg for key, draw in DRAWN.items() if key in result for suffix, svg in draw(result[key]).items()}


def _host_time(points: Mapping[str, Any]) -> dict[str, str]:
    def line(part: str) -> list[tuple[float, Spread]]:
        return [
            (float(count), Spread(parts[part]["median"], parts[part]["min"], parts[part]["max"]))
            for count, parts in points.items()
        ]

    series = [Series("together", line("host")), *(Series(part, line(part)) for part in HOST_PARTS)]
    return {"host": line_chart(series, Axes("Host time of a decode step", RUNNING, "microseconds per step"))}


def _curve(points: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    def line(value: Callable[[Sequence[Run]], Spread]) -> list[tuple[float, Spread]]:
        return [(float(count), value(runs)) for count, runs in points.items()]

    rates = line(lambda runs: spread(run["tokens_sampled"] / run["seconds"] for run in runs))
    steps = line(lambda runs: spread(1e3 * run["seconds"] / run["steps"] for run in runs))
    host = line(lambda runs: milliseconds_per_step(runs, HOST_PARTS))
    return {
        "tokens": line_chart(
            [Series("tiny model", rates)], Axes("Tokens per second, decoding together", RUNNING, "tokens/s", log_x=True)
        ),
        "steps": line_chart(
            [Series("whole step", steps), Series("schedule, pack and commit", host)],
            Axes("Time of a decode step, tiny model", RUNNING, "milliseconds per step"),
        ),
        "host": line_chart(
            [Series("schedule, pack and commit", host)],
            Axes("Host time of a decode step, tiny model", RUNNING, "milliseconds per step"),
        ),
    }


def _selection(measured: Mapping[str, Any]) -> dict[str, str]:
    skew = measured["drawn_skew"]
    modes = measured["balance"][skew]

    def lines(value: str) -> list[Series]:
        return [
            Series(
                mode,
                [(float(f), spread(point[value] for point in points)) for f, points in by_factor.items()],
            )
            for mode, by_factor in modes.items()
        ]

    factor = "capacity factor"
    return {
        "imbalance": line_chart(
            lines("imbalance"),
            Axes(f"Rank loads, popularities {skew}", factor, "hottest rank / mean rank", log_y=True),
        ),
        "kept": line_chart(
            lines("kept_share"), Axes(f"Picks kept, popularities {skew}", factor, "share of the top 8 that is kept")
        ),
    }


DRAWN: dict[str, Callable[[Any], dict[str, str]]] = {
    "host_us": _host_time,
    "curve": _curve,
    "balanced_selection": _selection,
    "peers": peers_chart,
}
"""By the key of a result file under which the figures lie."""


if __name__ == "__main__":
    main()
