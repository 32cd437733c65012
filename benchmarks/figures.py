"""From repeated runs to figures: rates, ratios of paired runs, and where the time of a step went.

A run is a mapping: `seconds` it took, and for our engine `steps` and the seconds of each part of its step clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Run = Mapping[str, float]

PARTS = ("schedule", "pack", "transport", "device", "commit")
HOST_PARTS = ("schedule", "pack", "commit")
OUTSIDE = "outside"
BUSY_LOAD = 0.75
"""Runnable processes, on average over the last minute, that an idle machine does not have."""


@dataclass(frozen=True)
class Spread:
    """Median of some values, and the least and the greatest of them."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f}-{self.greatest:,.{digits}f})"


def spread(values: Iterable[float]) -> Spread:
    """Summarise at least one value."""
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def rate(count: float, runs: Sequence[Run]) -> Spread:
    """Return `count` per second, over runs that all did `count` of something."""
    return spread(count / run["seconds"] for run in runs)


def speed_ratio(ours: Sequence[Run], theirs: Sequence[Run]) -> Spread:
    """Return how many times as fast ours were, run by run; runs with the same index are neighbours in time."""
    return spread(their["seconds"] / our["seconds"] for our, their in zip(ours, theirs, strict=True))


def paired_ratio(ours: Iterable[float], theirs: Iterable[float]) -> Spread:
    """Return theirs over ours, value by value; neighbours in time stand at the same place."""
    return spread(our / their for our, their in zip(ours, theirs, strict=True))


def milliseconds_per_step(runs: Sequence[Run], parts: Iterable[str]) -> Spread:
    """Time of some parts of the step clock together, per step."""
    names = [f"{part}_s" for part in parts]
    return spread(1e3 * sum(run[name] for name in names) / run["steps"] for run in runs)


def steps_per_second(runs: Sequence[Run]) -> Spread:
    """Return steps over the whole duration of a run."""
    return spread(run["steps"] / run["seconds"] for run in runs)


def step_parts(runs: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """Return milliseconds per step and share of the run, medians over the runs, for every part of a step.

    What the step clock does not see (text, queues, waking threads) is `outside`.
    """
    seconds = {part: [run[f"{part}_s"] for run in runs] for part in PARTS}
    seconds[OUTSIDE] = [run["seconds"] - sum(run[f"{part}_s"] for part in PARTS) for run in runs]
    return {
        part: (
            statistics.median(1e3 * spent / run["steps"] for spent, run in zip(each, runs, strict=True)),
            statistics.median(spent / run["seconds"] for spent, run in zip(each, runs, strict=True)),
        )
        for part, each in seconds.items()
    }


def load_before(result: Any) -> float:
    """Return the highest load average before the start in a result; 0 without one."""
    return max(_loads_before(result), default=0.0)


def _loads_before(part: Any) -> Iterator[float]:
    if isinstance(part, dict):
        yield from ([part["load_before"]] if "load_before" in part else [])
        for each in part.values():
            yield from _loads_before(each)
