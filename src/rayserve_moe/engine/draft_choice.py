"""How many drafts a step should verify: tokens that drafts are likely to gain against measured times of steps."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median

import numpy as np

from rayserve_moe.engine.expert_reach import ExpertReach

LADDER = (1, 3, 5, 7)
"""Drafts of a sequence that steps are planned with, besides none."""
KEPT_TIMES = 9
FORGETTING = 0.9
"""What is left of older outcomes after each verification of a row."""
PRIOR_TRIALS = 2.0
SLACK = 2.0
"""How many times as long as is known a step may take by itself."""
MARGIN = 1.02
"""What drafts must promise of the tokens per second without them."""


class StepTimes:
    """Median seconds of recent steps without prompts, by their number of rows rounded to three bits; the least of the
    first two."""

    def __init__(self) -> None:
        self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_TIMES))
        self._known: dict[int, float] = {}
        self._doubted: set[int] = set()

    def add(self, num_rows: int, seconds: float, *, known: Mapping[int, float] | None = None) -> float:
        """Note one step; returns its seconds, or fewer, where something else held it up.

        That is what goes far beyond other steps, of these or of those `known`, in which its rows would fit. Where it is
        the first of its size it is not taken for what such steps take.
        """
        size = _rounded(num_rows)
        of_others = {**self._known, **(known or {})}.items()
        most = min((SLACK * one * max(1.0, num_rows / rows) for rows, one in of_others), default=seconds)
        if seconds > most and size not in self._known and size not in self._doubted:
            self._doubted.add(size)
            return most
        seconds = min(seconds, most)
        times, is_new = self._times[size], size not in self._known
        times.append(seconds)
        self._known[size] = median(times) if len(times) > 2 else min(times)
        if is_new:
            self._known = dict(sorted(self._known.items()))
        return seconds

    def known(self) -> Mapping[int, float]:
        """Seconds by rounded number of rows, ascending."""
        return self._known


def seconds_of(num_rows: int, known: Mapping[int, float], *, reach: ExpertReach) -> float:
    """Seconds of a step: between its neighbours in `known`, and beyond them as the last two rise, with the work that
    `reach` tells of so many rows. `known` is ascending and not empty."""
    sizes, size = list(known), _rounded(num_rows)
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


class Acceptance:
    """How often drafts of each row are right, of those whose predecessors were; a new row has the mean of all."""

    def __init__(self, num_rows: int) -> None:
        self._right, self._tried = np.zeros(num_rows), np.zeros(num_rows)
        self._owners = np.full(num_rows, -1, np.int64)
        self._right_of_all, self._tried_of_all = 0.5 * PRIOR_TRIALS, PRIOR_TRIALS

    def of(self, rows: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """The share of each row, float [N]."""
        is_new = self._owners[rows] != generations
        self._right[rows[is_new]] = self._tried[rows[is_new]] = 0.0
        self._owners[rows] = generations
        mean = self._right_of_all / self._tried_of_all
        return (self._right[rows] + PRIOR_TRIALS * mean) / (self._tried[rows] + PRIOR_TRIALS)

    def note(self, rows: np.ndarray, drafted: np.ndarray, *, right: np.ndarray) -> None:
        """Note of rows how many drafts they had, and how many were right: the first wrong one ends the trial."""
        tried = right + (right < drafted)
        self._right[rows] = FORGETTING * self._right[rows] + right
        self._tried[rows] = FORGETTING * self._tried[rows] + tried
        self._right_of_all = FORGETTING * self._right_of_all + right.sum()
        self._tried_of_all = FORGETTING * self._tried_of_all + tried.sum()


def choose_drafts(  # noqa: PLR0913 (what is known, by keyword)
    num_rows: int,
    available: np.ndarray,
    *,
    acceptance: np.ndarray,
    plain: Mapping[int, float],
    verifying: Mapping[int, float],
    reach: ExpertReach,
    levels: np.ndarray | None = None,
) -> int:
    """Return the number of drafts per sequence, of LADDER or 0, with the most tokens per second.

    Where drafts are trees of `levels` int [N], of which each has a right draft with `acceptance`: all, or 0.

    `num_rows` sequences decode; those that have drafts have `available` int [N] of them, each right with `acceptance`
    [N]. `plain` and `verifying` are the known times of steps without and with drafts, `plain` not empty. Of more rows
    than were ever verified only the least number is considered: what was never measured is tried in small steps, and
    expected to take as long as the one before until two have been measured, for a part is lost to all of them alike.
    """
    alone, largest, at = seconds_of(num_rows, plain, reach=reach), max(verifying, default=0), _rounded(num_rows)
    known = {size: seconds for size, seconds in sorted({**plain, **verifying}.items()) if size > at}
    first, with_alone = min(known, default=at), {at: alone} | known
    ladder = np.array(LADDER) if levels is None else available.max(keepdims=True)
    counts = np.minimum(available, ladder[:, None])
    in_turn = counts if levels is None else levels[None]
    gained = acceptance * (1 - acceptance**in_turn) / np.maximum(1 - acceptance, 1e-9)
    sizes, tokens = num_rows + counts.sum(axis=1), num_rows + gained.sum(axis=1)
    best, best_rate = 0, MARGIN * num_rows / alone
    for most, size, expected in zip(ladder.tolist(), sizes.tolist(), tokens.tolist(), strict=True):
        rate = expected / seconds_of(size, known if size > first and known else with_alone, reach=reach)
        if rate > best_rate:
            best, best_rate = most, rate
        if _rounded(size) > largest:
            break
    return best


def _rounded(count: int) -> int:
    """`count` with three significant bits, upwards."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step
