"""Chart of a load as SVG: distributions of latencies, and tokens per second over the run."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from rayserve_moe.bench.client import Outcome
from rayserve_moe.bench.report import MS, TITLES, latencies_of

_WIDTH, _HEIGHT = 900, 640
_PANEL = (400, 220)
"""Width and height of a panel."""
_COLOURS = {"ttft": "#0072b2", "tpot": "#009e73", "itl": "#d55e00", "e2el": "#cc79a7"}
"""By Okabe and Ito."""
_STYLE = "font-family:system-ui,sans-serif;font-size:12px"
_MAX_POINTS = 200


def chart(outcomes: Sequence[Outcome], *, title: str) -> str:
    """Return an SVG document for the complete answers of a run."""
    latencies = latencies_of(outcomes)
    panels = [
        _distribution(["ttft", "e2el"], latencies, "Requests within a latency"),
        _distribution(["tpot", "itl"], latencies, "Tokens within a latency"),
        _throughput(outcomes),
        _over_time(outcomes),
    ]
    places = [(60, 60), (500, 60), (60, 370), (500, 370)]
    placed = [f'<g transform="translate({x},{y})">{panel}</g>' for (x, y), panel in zip(places, panels, strict=True)]
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{_STYLE}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
            f'<text x="30" y="30" font-size="15" fill="#111">{html.escape(title)}</text>',
            *placed,
            "</svg>",
            "",
        ]
    )


def _distribution(metrics: Sequence[str], latencies: dict[str, list[float]], heading: str) -> str:
    """Return a panel of cumulative shares over ms."""
    lines, labels = [], []
    largest = max((max(latencies[metric], default=0.0) for metric in metrics), default=0.0) * MS or 1.0
    for row, metric in enumerate(metrics):
        ms = np.sort(np.asarray(latencies[metric])) * MS
        if len(ms):
            shares = np.linspace(0, 1, min(_MAX_POINTS, len(ms) + 1))
            lines.append(_line(np.quantile(ms, shares) / largest, shares, _COLOURS[metric]))
        labels.append(_label(TITLES[metric], row, _COLOURS[metric]))
    return _frame(heading, x_end=f"{_number(largest)} ms", y_end="100 %") + "".join(lines + labels)


def _throughput(outcomes: Sequence[Outcome]) -> str:
    """Return a panel of output events per second over the run."""
    arrivals = np.asarray([moment for one in outcomes for moment in one.arrivals])
    if not len(arrivals):
        return _frame("Tokens per second", x_end="", y_end="")
    first = min(one.started for one in outcomes)
    seconds = float(arrivals.max() - first) or 1.0
    counts, edges = np.histogram(arrivals - first, bins=min(60, max(5, math.ceil(seconds))), range=(0, seconds))
    rates = counts / np.diff(edges)
    largest = float(rates.max()) or 1.0
    line = _line((edges[:-1] + edges[1:]) / 2 / seconds, rates / largest, "#0072b2")
    return _frame("Output events per second", x_end=f"{_number(seconds)} s", y_end=_number(largest)) + line


def _over_time(outcomes: Sequence[Outcome]) -> str:
    """Return a panel of TTFT by the time of the request."""
    done = [one for one in outcomes if one.is_ok]
    if not done:
        return _frame("TTFT of requests", x_end="", y_end="")
    starts, ttfts = np.asarray([one.started for one in done]), np.asarray([one.ttft for one in done]) * MS
    seconds, largest = float(np.ptp(starts)) or 1.0, float(ttfts.max()) or 1.0
    points = zip((starts - starts.min()) / seconds, ttfts / largest, strict=True)
    width, height = _PANEL
    dots = (f'<circle cx="{x * width:.1f}" cy="{(1 - y) * height:.1f}" r="2" fill="#0072b2"/>' for x, y in points)
    frame = _frame("TTFT by the time of the request", x_end=f"{_number(seconds)} s", y_end=f"{_number(largest)} ms")
    return frame + "".join(dots)


def _line(xs: np.ndarray, ys: np.ndarray, colour: str) -> str:
    width, height = _PANEL
    points = " ".join(f"{x * width:.1f},{(1 - y) * height:.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _label(text: str, row: int, colour: str) -> str:
    width, height = _PANEL
    y = height - 28 + 16 * row
    return f'<text x="{width - 6}" y="{y}" text-anchor="end" fill="{colour}">{html.escape(text)}</text>'


def _frame(heading: str, *, x_end: str, y_end: str) -> str:
    width, height = _PANEL
    grid = "".join(
        f'<line x1="0" x2="{width}" y1="{height * part / 4}" y2="{height * part / 4}" stroke="#ddd"/>'
        for part in range(5)
    )
    return (
        f'{grid}<text x="0" y="-10" fill="#111">{html.escape(heading)}</text>'
        f'<text x="-6" y="10" text-anchor="end" fill="#555">{html.escape(y_end)}</text>'
        f'<text x="-6" y="{height}" text-anchor="end" fill="#555">0</text>'
        f'<text x="{width}" y="{height + 18}" text-anchor="end" fill="#555">{html.escape(x_end)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
