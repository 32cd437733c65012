"""Matrices of which `make test` runs a part: of each parameter's values as many as others make room for."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import pytest


def mark_others_slow(items: Iterable[Any]) -> None:
    """Of a test that is marked `sampled(every)` mark the variants as slow whose places do not add up to a multiple.

    A variant has a place in each `parametrize`, among the values that are not slow already. So of one `parametrize` one
    in `every` values is left, and of several every value, with some of the others'. `items` are pytest's.
    """
    for item in items:
        if (marker := item.get_closest_marker("sampled")) and _sum_of_places(item) % _every(item, marker):
            item.add_marker(pytest.mark.slow)


def _every(item: Any, marker: pytest.Mark) -> int:
    if len(marker.args) != 1 or not isinstance(marker.args[0], int) or marker.args[0] < 2:
        raise pytest.UsageError(f"{item.nodeid}: sampled takes one whole number from 2 on")
    return marker.args[0]


def _sum_of_places(item: Any) -> int:
    markers = list(item.iter_markers("parametrize"))
    if not markers:
        raise pytest.UsageError(f"{item.nodeid}: a test without `parametrize` is not sampled")
    return sum(_place(item.callspec.params, marker) for marker in markers)


def _place(params: dict[str, Any], marker: pytest.Mark) -> int:
    """The place of a variant among the values of one `parametrize` that are not slow; 0 for those that are."""
    names, sets = marker.args
    names = [names] if isinstance(names, str) else list(names)
    given = [one if hasattr(one, "marks") else pytest.param(*(one if len(names) > 1 else (one,))) for one in sets]
    quick = [one.values for one in given if not any(mark.name == "slow" for mark in one.marks)]
    mine = [params[name] for name in names]
    return next((place for place, values in enumerate(quick) if all(map(operator.is_, values, mine))), 0)
