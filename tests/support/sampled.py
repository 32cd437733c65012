"""Matrices of which `make test` runs a part: variants of a test that have every value of every parameter among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import pytest


def mark_others_slow(items: Iterable[Any]) -> None:
    """Of a test that is marked `sampled(every)` mark the variants as slow whose places do not add up to a multiple.

    A variant has a place in every parameter, so a value goes with some values of each other one. `items` are pytest's.
    """
    marked = [item for item in items if item.get_closest_marker("sampled")]
    for _, matrix in groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        variants = list(matrix)
        (every,) = variants[0].get_closest_marker("sampled").args
        for variant, places in zip(variants, _places([one.callspec.params for one in variants]), strict=True):
            if sum(places) % every:
                variant.add_marker(pytest.mark.slow)


def _places(variants: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The places of the values of each variant; parameters that change together have one."""
    columns: dict[tuple[int, ...], None] = {}
    for name in variants[0]:
        seen: dict[int, int] = {}
        columns[tuple(seen.setdefault(id(variant[name]), len(seen)) for variant in variants)] = None
    return list(zip(*columns, strict=True))
