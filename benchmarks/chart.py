"""A line chart as SVG: axes, a legend, a bar from least to greatest at each point; readable without colour too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.figures import Spread

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 70, 55
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6000")
"""Told apart under the common kinds of colour blindness, and dark enough on white; markers and dashes differ too."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4")
INK, GRID, PAPER = "#24292f", "#d8dee4", "#ffffff"
NUM_TICKS = 6


@dataclass(frozen=True)
class Series:
    """A line: points of a number and a spread, in ascending order of the numbers."""

    name: str
    points: Sequence[tuple[float, Spread]]


@dataclass(frozen=True)
class Axes:
    """What the chart says around its lines. `log_x`, `log_y` place numbers by their logarithms; all must be above 0."""

    title: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class _Frame:
    """Where numbers lie on the paper."""

    x: Callable[[float], float]
    y: Callable[[float], float]
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]


def line_chart(series: Sequence[Series], axes: Axes) -> str:
    """Draw at most five lines, the y axis from zero, or from a power of ten where it is logarithmic.

    ValueError for more lines, for none, or for one without points.
    """
    if not 0 < len(series) <= len(COLOURS) or not all(each.points for each in series):
        raise ValueError(f"a chart takes 1 to {len(COLOURS)} lines, each with a point")
    frame = _frame_of(series, axes)
    described = f"{axes.y_label} by {axes.x_label}: {', '.join(each.name for each in series)}"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    text = f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title desc" {text}>',
        f'<title id="title">{escape(axes.title)}</title>',
        f'<desc id="desc">{escape(described)}</desc>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{PAPER}"/>',
        _text(axes.title, LEFT, 24, extra='font-size="15" font-weight="600"'),
        *_axis_lines(frame, axes),
        *(part for i, each in enumerate(series) for part in _line(each, i, frame)),
        *_legend(series),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def nice_ticks(greatest: float, num_ticks: int = NUM_TICKS) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from 0 to the first that is not below `greatest` (above 0)."""
    rough = greatest / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [round(i * step, 12) for i in range(math.ceil(greatest / step - 1e-9) + 1)]


def powers_of_ten(least: float, greatest: float) -> list[float]:
    """Powers of ten from the last that is not above `least` (above 0) to the first above it not below `greatest`."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(greatest))
    return [float(f"1e{power}") for power in range(first, max(last, first + 1) + 1)]


def _frame_of(series: Sequence[Series], axes: Axes) -> _Frame:
    numbers = sorted({x for each in series for x, _ in each.points})
    values = [value for each in series for _, value in each.points]
    least, greatest = min(value.least for value in values), max(value.greatest for value in values)
    y_ticks = powers_of_ten(least, greatest) if axes.log_y else nice_ticks(greatest or 1.0)
    if axes.log_x:
        x_ticks = numbers
        low, high = math.log(numbers[0]), math.log(numbers[-1])
    else:
        x_ticks = nice_ticks(numbers[-1])
        low, high = 0.0, x_ticks[-1]

    def x(number: float) -> float:
        place = math.log(number) if axes.log_x else number
        return LEFT + (WIDTH - LEFT - RIGHT) * ((place - low) / (high - low) if high > low else 0.5)

    def y(value: float) -> float:
        part = value / y_ticks[-1]
        if axes.log_y:
            part = math.log(value / y_ticks[0]) / math.log(y_ticks[-1] / y_ticks[0])
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * part

    return _Frame(x, y, x_ticks, y_ticks)


def _axis_lines(frame: _Frame, axes: Axes) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value in frame.y_ticks:
        y = frame.y(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(_text(_number(value), LEFT - 8, y + 4, anchor="end"))
    for value in frame.x_ticks:
        x = frame.x(value)
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="{INK}"/>')
        parts.append(_text(_number(value), x, bottom + 19, anchor="middle"))
    middle = (TOP + bottom) / 2
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>')
    parts.append(_text(axes.x_label, (LEFT + right) / 2, HEIGHT - 14, anchor="middle"))
    parts.append(_text(axes.y_label, 18, middle, anchor="middle", extra=f'transform="rotate(-90 18 {middle:.1f})"'))
    return parts


def _line(series: Series, index: int, frame: _Frame) -> list[str]:
    places = [(frame.x(x), frame.y(value.median)) for x, value in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" {_stroke(index)}/>']
    for (x, y), (_, value) in zip(places, series.points, strict=True):
        low, high = frame.y(value.least), frame.y(value.greatest)
        parts.append(
            f'<path d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8" '
            f'stroke="{COLOURS[index]}"/>'
        )
        parts.append(_marker(x, y, index))
    return parts


def _legend(series: Sequence[Series]) -> list[str]:
    parts = []
    x = float(LEFT)
    for index, each in enumerate(series):
        parts.append(f'<path d="M{x:.1f} 46h28" {_stroke(index)}/>')
        parts.append(_marker(x + 14, 46, index))
        parts.append(_text(each.name, x + 34, 50))
        x += 52 + 6.6 * len(each.name)
    return parts


def _marker(x: float, y: float, index: int) -> str:
    outline = (
        f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z",
        f"M{x:.1f} {y - 5:.1f}l4.5 8h-9z",
        f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
        f"M{x - 4.5:.1f} {y - 3:.1f}h9l-4.5 8z",
    )[index]
    return f'<path d="{outline}" fill="{COLOURS[index]}" stroke="{PAPER}"/>'


def _stroke(index: int) -> str:
    dashes = f' stroke-dasharray="{DASHES[index]}"' if DASHES[index] else ""
    return f'fill="none" stroke="{COLOURS[index]}" stroke-width="2"{dashes}'


def _text(words: str, x: float, y: float, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"
