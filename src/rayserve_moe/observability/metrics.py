"""Histograms and counters of requests, in plain Python; rendering is elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
LENGTH_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class HistogramState(NamedTuple):
    """The contents of a histogram."""

    bounds: tuple[float, ...]
    """Ascending; the last is infinity."""
    at_or_below: tuple[int, ...]
    """Number of values at or below each bound."""
    total: float
    """Sum of all values."""


class Histogram:
    """Counts values by ascending bounds. A single thread adds to it; any thread may read it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def add_all(self, values: np.ndarray) -> None:
        """Count several values."""
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._total += float(values.sum())

    def state(self) -> HistogramState:
        """Return the current counts."""
        return HistogramState((*self._bounds, float("inf")), tuple(np.cumsum(self._counts).tolist()), self._total)


def _seconds() -> Histogram:
    return Histogram(LATENCY_BOUNDS_S)


def _tokens() -> Histogram:
    return Histogram(LENGTH_BOUNDS)


@dataclass
class RequestMetrics:
    """Metrics of all choices since the start, in seconds and tokens."""

    time_to_first_token: Histogram = field(default_factory=_seconds)
    inter_token: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS_S))
    queue_time: Histogram = field(default_factory=_seconds)
    end_to_end: Histogram = field(default_factory=_seconds)
    prompt_tokens: Histogram = field(default_factory=_tokens)
    output_tokens: Histogram = field(default_factory=_tokens)
    finished: Counter[str] = field(default_factory=Counter)
    """By finish reason."""
    num_prompt_tokens: int = 0
    """Each prompt counts once."""
    num_cached_tokens: int = 0
    """Each prompt counts once."""
