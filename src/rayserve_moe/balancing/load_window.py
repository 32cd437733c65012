"""Tokens per expert over the last steps, summed from readings of cumulative counts that wrap around."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

BUCKETS = 64
AGED = 0.5
"""Weight of a token as old as the window; a current token weighs 1."""


@dataclass(frozen=True, eq=False)
class LoadReading:
    """A reading of cumulative counts. Readings of different generations are unrelated."""

    generation: int
    """Changes with the weights, and when counting is reset."""
    step: int
    """Number of counted steps."""
    counts: np.ndarray
    """Tokens, int32 [layers, experts], wrapping around."""


class LoadWindow:
    """Sums tokens per expert over the last `window` steps, at least the last reading; later tokens weigh more.

    The window is kept as at most BUCKETS runs of steps, independent of its length.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._last: LoadReading | None = None
        self._buckets: deque[tuple[int, int, np.ndarray]] = deque()

    def add(self, reading: LoadReading) -> None:
        """Add the tokens counted since the previous reading.

        Counting is reset by the first reading, by a reading of another generation, and if counts fell. A reading of an
        earlier or the same step is ignored.
        """
        last = self._last
        if last is not None and last.generation == reading.generation and last.counts.shape == reading.counts.shape:
            if reading.step <= last.step:
                return
            counted = reading.counts.astype(np.int32).view(np.uint32) - last.counts.astype(np.int32).view(np.uint32)
            if not (counted >> 31).any():
                self._last = reading
                self._put(last.step, reading.step, counted)
                return
        self._last = reading
        self._buckets.clear()

    def totals(self) -> np.ndarray:
        """Return the weighted tokens of the window: float64 [layers, experts], or [0, 0] before any reading."""
        if self._last is None:
            return np.zeros((0, 0))
        sums = np.zeros(self._last.counts.shape)
        for _, end, counted in self._buckets:
            sums += AGED ** ((self._last.step - end) / self._window) * counted
        return sums

    def _put(self, start: int, end: int, counted: np.ndarray) -> None:
        begun = self._buckets[-1] if self._buckets else None
        if begun is not None and end - begun[0] <= self._window // BUCKETS:
            self._buckets[-1] = (begun[0], end, begun[2] + counted)
        else:
            self._buckets.append((start, end, counted.astype(np.int64)))
        while len(self._buckets) > 1 and self._buckets[0][0] < end - self._window:
            self._buckets.popleft()
