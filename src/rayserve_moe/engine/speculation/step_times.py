"""Step times by number of rows: measured, or estimated from the number of distinct experts that the rows reach.

Most of the time of a small step goes into reading the weights of its experts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median

import numpy as np

OWN_WORK = 0.1
"""Share of a single-row step that scales with rows instead of experts, such as attention."""
LOOK_EVERY = 16
"""Steps between two updates from captured routing."""
FORGETTING = 0.9
HALVINGS = 20
KEPT_TIMES = 9
SLACK = 2.0
"""Maximum seconds of a step, relative to the seconds expected from other steps."""


class StepTimes:
    """Median seconds of recent steps without prompts, by number of rows rounded up to three significant bits.

    The first two measurements of a size give their minimum.
    """

    def __init__(self) -> None:
        self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_TIMES))
        self._known: dict[int, float] = {}
        self._doubted: set[int] = set()

    def add(self, num_rows: int, seconds: float, *, known: Mapping[int, float] | None = None) -> float:
        """Record a step and return its seconds, or a limit if they exceed it: then the excess is an outside delay.

        The limit is the minimum over all recorded and `known` sizes of SLACK times their seconds, scaled up to
        `num_rows`. The first measurement of a size is not recorded if it exceeds the limit.
        """
        size = rounded(num_rows)
        of_others = {**self._known, **(known or {})}.items()
        max_s = min((SLACK * each_s * max(1.0, num_rows / rows) for rows, each_s in of_others), default=seconds)
        if seconds > max_s and size not in self._known and size not in self._doubted:
            self._doubted.add(size)
            return max_s
        seconds = min(seconds, max_s)
        times, is_new = self._times[size], size not in self._known
        times.append(seconds)
        self._known[size] = median(times) if len(times) > 2 else min(times)
        if is_new:
            self._known = dict(sorted(self._known.items()))
        return seconds

    def known(self) -> Mapping[int, float]:
        """Return the seconds by rounded number of rows, ascending."""
        return self._known


def seconds_of(num_rows: int, known: Mapping[int, float], *, reach: ExpertReach) -> float:
    """Return the expected seconds of a step, from the seconds by rounded number of rows in `known`.

    They are interpolated by the work that `reach` gives for a number of rows. Larger steps continue the slope of the
    last two sizes; smaller steps take as long as the first size. `known` is ascending and not empty.
    """
    sizes, size = list(known), rounded(num_rows)
    above = bisect_left(sizes, size)
    if above == 0 or len(sizes) == 1:
        return known[sizes[0]]
    if size in known:
        return known[size]
    above = min(above, len(sizes) - 1)
    first, second = sizes[above - 1], sizes[above]
    slope = (known[second] - known[first]) / (reach.work(second) - reach.work(first))
    if size > second:
        return known[second] + max(0.0, slope) * (reach.work(size) - reach.work(second))
    return known[first] + slope * (reach.work(size) - reach.work(first))


class ExpertReach:
    """Estimate of the distinct experts per layer that `n` rows reach: E (1 - (1 - k / E)^n).

    The formula holds for rows that choose k of E experts uniformly and independently. Similar rows choose as if from
    fewer experts: E is fitted to captured routing, and begins with the number of experts.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        self._num_experts, self._top_k = num_experts, top_k
        self._effective, self._num_steps = float(num_experts), 0
        self._work: dict[int, float] = {}

    def distinct(self, num_rows: int) -> float:
        """Return the mean number of experts of a layer that `num_rows` rows reach."""
        return self._effective * (1 - (1 - self._top_k / self._effective) ** num_rows)

    def work(self, num_rows: int) -> float:
        """Return the work of a step with `num_rows` rows in units of a single-row step, without the constant part."""
        if num_rows not in self._work:
            experts = self.distinct(num_rows) / self._top_k
            self._work[num_rows] = (1 - OWN_WORK) * experts + OWN_WORK * num_rows
        return self._work[num_rows]

    def record(self, routing: np.ndarray) -> None:
        """Update the estimate from captured rows [T, layers, k] of a step, every LOOK_EVERY steps."""
        self._num_steps += 1
        if len(routing) > 1 and self._num_steps % LOOK_EVERY == 1:
            found = self._effective_of(routing)
            self._effective = FORGETTING * self._effective + (1 - FORGETTING) * found
            self._work.clear()

    def _effective_of(self, routing: np.ndarray) -> float:
        """Return the number of experts for which independent rows reach as many experts as `routing`, by bisection."""
        num_rows, num_layers, _ = routing.shape
        reached = np.zeros((num_layers, self._num_experts), np.bool_)
        reached[np.arange(num_layers)[:, None], routing.swapaxes(0, 1).reshape(num_layers, -1)] = True
        wanted, low, high = reached.sum() / num_layers, float(self._top_k), float(self._num_experts)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            too_few = middle * (1 - (1 - self._top_k / middle) ** num_rows) < wanted
            low, high = (middle, high) if too_few else (low, middle)
        return high


def rounded(count: int) -> int:
    """Return `count` rounded up to three significant bits."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step
