"""Selection of tests for `make test`: it skips most variants of large matrices, and laws of `make test-native`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_others_slow(items: Iterable[Any]) -> None:
    """Of a test that is marked `sampled(every)` mark the variants as slow whose places do not add up to a multiple.

    A variant has a place in each `parametrize`, among the values that are not slow already. So of one `parametrize` one
    in `every` values is left, and of several every value, with some of the others'. `items` are pytest's.
    """
    values = _QuickValues()
    for item in items:
        if (marker := item.get_closest_marker("sampled")) and _sum_of_places(item, values) % _every(item, marker):
            item.add_marker(pytest.mark.slow)


def leave_to_native_kernels(items: Iterable[Any]) -> None:
    """Mark tests with the mark `natively` as slow: they are laws of the core model that hold over any kernels."""
    for item in items:
        if item.get_closest_marker("natively"):
            item.add_marker(pytest.mark.slow)


def _every(item: Any, marker: pytest.Mark) -> int:
    if len(marker.args) != 1 or not isinstance(marker.args[0], int) or marker.args[0] < 2:
        raise pytest.UsageError(f"{item.nodeid}: sampled takes one whole number from 2 on")
    return marker.args[0]


class _QuickValues:
    """Cache of the parameter names and quick values of each `parametrize`."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[list[str], dict[tuple[int, ...], int]]] = {}
        self._held: list[Any] = []
        """Values whose `id` is a key, kept alive."""

    def of(self, marker: pytest.Mark) -> tuple[list[str], dict[tuple[int, ...], int]]:
        """Return the parameter names of `marker`, and the places by `id` of its values that are not slow."""
        if id(marker) not in self._of:
            names, sets = marker.args
            names = [names] if isinstance(names, str) else list(names)
            given = [
                one if hasattr(one, "marks") else pytest.param(*(one if len(names) > 1 else (one,))) for one in sets
            ]
            quick = [one.values for one in given if not any(mark.name == "slow" for mark in one.marks)]
            places = {tuple(map(id, values)): place for place, values in reversed([*enumerate(quick)])}
            self._of[id(marker)] = names, places
            self._held.append(quick)
        return self._of[id(marker)]


def _sum_of_places(item: Any, values: _QuickValues) -> int:
    markers = list(item.iter_markers("parametrize"))
    if not markers:
        raise pytest.UsageError(f"{item.nodeid}: a test without `parametrize` is not sampled")
    return sum(_place(item.callspec.params, *values.of(marker)) for marker in markers)


def _place(params: dict[str, Any], names: list[str], quick: dict[tuple[int, ...], int]) -> int:
    """Return the place of a variant among the `quick` values of one `parametrize`, 0 if it is slow."""
    return quick.get(tuple(id(params[name]) for name in names), 0)
