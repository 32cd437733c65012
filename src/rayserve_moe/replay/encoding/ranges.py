"""Parts of a routing by position: rows from or before a position, missing rows, and labels as ranges."""

from __future__ import annotations

import itertools

import numpy as np

from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.requests.row_parts import parts_between


def routing_from(routing: RoutedExperts, start: int) -> RoutedExperts:
    """Return the routing without its rows before position `start` (which may be past the last row)."""
    if start <= routing.start:
        return routing
    return RoutedExperts(
        rows=routing.rows[start - routing.start :],
        start=start,
        missing=_ranges_from(routing.missing, start),
        source=_ranges_from(routing.source, start),
        weight_version=_ranges_from(routing.weight_version, start),
        parts=parts_between(routing, start, last=routing.start + len(routing.rows)),
    )


def routing_until(routing: RoutedExperts, end: int) -> RoutedExperts:
    """Return the routing without its rows from position `end` on (which may be before the first row)."""
    if end >= routing.start + len(routing.rows):
        return routing
    return RoutedExperts(
        rows=routing.rows[: max(0, end - routing.start)],
        start=routing.start,
        missing=_ranges_until(routing.missing, end),
        source=_ranges_until(routing.source, end),
        weight_version=_ranges_until(routing.weight_version, end),
        parts=parts_between(routing, routing.start, last=end),
    )


def presence(routing: RoutedExperts) -> np.ndarray:
    """Return the mask of rows that hold data, bool [N]."""
    present = np.ones(len(routing.rows), np.bool_)
    for first, last in routing.missing:
        present[first - routing.start : last - routing.start] = False
    return present


def missing_ranges(present: np.ndarray, start: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of positions `[from, to)`, counted from `start`, in which a bool array is false."""
    edges = np.flatnonzero(np.diff(np.concatenate([[True], present, [True]]).astype(np.int8))) + start
    return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))


def labels_of(ranges: tuple[tuple[int, int, str], ...], start: int, *, count: int) -> np.ndarray:
    """Return the label of each row from ranges `(from, to, label)`: object [count], empty outside of all ranges."""
    labels = np.full(count, "", object)
    for first, last, label in ranges:
        labels[max(0, first - start) : max(0, last - start)] = label
    return labels


def label_ranges(labels: np.ndarray, start: int) -> tuple[tuple[int, int, str], ...]:
    """Return labels by row as a minimum of ranges `(from, to, label)`; rows without a label are in no range."""
    if not len(labels):
        return ()
    borders = [0, *(np.flatnonzero(labels[1:] != labels[:-1]) + 1).tolist(), len(labels)]
    runs = ((first, last, labels[first]) for first, last in itertools.pairwise(borders))
    return tuple((start + first, start + last, label) for first, last, label in runs if label)


def _ranges_from(ranges: tuple, start: int) -> tuple:
    return tuple((max(first, start), last, *label) for first, last, *label in ranges if last > start)


def _ranges_until(ranges: tuple, end: int) -> tuple:
    return tuple((first, min(last, end), *label) for first, last, *label in ranges if first < end)
