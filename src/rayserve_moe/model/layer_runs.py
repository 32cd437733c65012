"""Runs of layers that repeat a pattern of kinds. One loop computes a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from rayserve_moe.model.spec import LayerSpec, ModelSpec


class LayerRun(NamedTuple):
    """Neighbouring layers that repeat a period of one or several kinds."""

    period: tuple[LayerSpec, ...]
    """Kinds of the layers of a period, without their windows."""
    first: int
    """Number of layers ahead of the run."""
    first_of_mixer: dict[str, int]
    """Number of layers ahead of the run with each kind of mixer."""
    first_of_ffn: dict[str, int]
    """Number of layers ahead of the run with each kind of feed-forward network."""
    length: int
    """Number of periods."""


def layer_runs(spec: ModelSpec, cuts: Sequence[int] = ()) -> Iterator[LayerRun]:
    """Yield the runs of a model's layers in order; a run never crosses a layer index in `cuts`."""
    kinds = [layer.kind for layer in spec.layers]
    borders = sorted({0, len(kinds), *(cut for cut in cuts if 0 < cut < len(kinds))})
    first = 0
    for start, end in pairwise(borders):
        for size, length in periods(kinds[start:end]):
            yield LayerRun(
                tuple(kinds[first : first + size]),
                first,
                _counts([kind.mixer for kind in kinds], first),
                _counts([kind.ffn for kind in kinds], first),
                length,
            )
            first += size * length


def _counts(names: Sequence[str], end: int) -> dict[str, int]:
    """Return the number of occurrences of each name among the first `end`."""
    return {name: names[:end].count(name) for name in names}


def periods(kinds: Sequence[object]) -> list[tuple[int, int]]:
    """Return (period, repetitions) of the successive runs that make up a sequence.

    The split minimizes the number of distinct layers to compile, then the number of runs. A period of several kinds
    occurs at least twice.
    """
    best: list[tuple[int, int, list[tuple[int, int]]]] = [(0, 0, [])]
    for end in range(1, len(kinds) + 1):
        candidates = []
        for size in range(1, end + 1):
            length = 1
            while size * length <= end and _repeats(kinds, end - size * length, end, size):
                if size == 1 or length > 1:
                    num_bodies, num_runs, runs = best[end - size * length]
                    candidates.append((num_bodies + size, num_runs + 1, [*runs, (size, length)]))
                length += 1
        best.append(min(candidates, key=lambda found: found[:2]))
    return best[-1][2]


def _repeats(kinds: Sequence[object], start: int, end: int, size: int) -> bool:
    """Return True if `kinds[start:end]` repeats its first `size` kinds, given that all but the first period do."""
    second = start + size
    return second == end or kinds[start:second] == kinds[second : second + size]
