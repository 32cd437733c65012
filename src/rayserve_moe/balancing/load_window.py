"""Tokens per expert over the last steps, summed from readings of counts that only ever grow, until they wrap around."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

BUCKETS = 64
AGED = 0.5
"""What a token counts that is as old as the window; one of now counts 1."""


@dataclass(frozen=True, eq=False)
class LoadReading:
    """Tokens per layer and expert after `step` steps: `counts` int32 [layers, experts], wrapping around.

    Readings of different generations have nothing to do with each other: other weights, or counts begun anew.
    """

    generation: int
    step: int
    counts: np.ndarray


class LoadWindow:
    """Sums tokens per expert over the last `window` steps, the last reading at least; later tokens count more.

    What is kept is cut into BUCKETS runs of steps at most, however long the window is.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._last: LoadReading | None = None
        self._buckets: deque[tuple[int, int, np.ndarray]] = deque()

    def add(self, reading: LoadReading) -> None:
        """Take over what was counted since the reading before.

        Counting starts over with the first reading, one of another generation, and one whose counts fell. A reading of
        an earlier or the same step is ignored.
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
        """Tokens of the window, aged: float64 [layers, experts]; all zero, of no layer, before any reading."""
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
