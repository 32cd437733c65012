"""A line chart as data, of which every number can be checked without drawing it; `plots` draws it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.figures import Spread

MOST_LINES = 5


@dataclass(frozen=True)
class Series:
    """A line: points of a number and a spread, in ascending order of the numbers."""

    name: str
    points: Sequence[tuple[float, Spread]]


@dataclass(frozen=True)
class Chart:
    """Lines, and what stands around them. An axis starts at 0, or is logarithmic; `note` says what limits its figures.

    ValueError for no lines or more than MOST_LINES, and for a line without points.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.series) <= MOST_LINES or not all(each.points for each in self.series):
            raise ValueError(f"a chart takes 1 to {MOST_LINES} lines, each with a point")

    @property
    def fingerprint(self) -> str:
        """Digest of all that is drawn: a file that holds it shows these figures."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]
