"""Putting together what came in pieces: routing rows and likeliest tokens of one choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayserve_moe.requests import RoutedExperts, TopLogprobs


def joined_routing(before: RoutedExperts | None, after: RoutedExperts | None) -> RoutedExperts | None:
    """Routing of both, where `after` starts at the position that `before` ends at; None where there is neither.

    Pieces without rows may come from anywhere: they are what is left of tokens beyond a stop string.
    """
    if before is None or after is None or len(after.rows) == 0:
        return after if before is None else before
    assert after.start == before.start + len(before.rows), "a piece of routing does not go on from the one before"
    return replace(
        before,
        rows=np.concatenate([before.rows, after.rows]),
        missing=joined_ranges(before.missing + after.missing),
        source=joined_ranges(before.source + after.source),
        weight_version=joined_ranges(before.weight_version + after.weight_version),
    )


def joined_top(before: TopLogprobs | None, after: TopLogprobs | None) -> TopLogprobs | None:
    """Likeliest tokens of both, one after the other; None where there is neither."""
    if before is None or after is None:
        return after if before is None else before
    return TopLogprobs(
        np.concatenate([before.token_ids, after.token_ids]), np.concatenate([before.logprobs, after.logprobs])
    )


def labelled_ranges(labels_from: tuple[tuple[int, str], ...], end: int) -> tuple[tuple[int, int, str], ...]:
    """Ranges `(from, to, label)` from pairs of a position and the label from there on, up to position `end`."""
    ends = [min(position, end) for position, _ in labels_from[1:]] + [end]
    pairs = zip(labels_from, ends, strict=False)
    return tuple((first, last, label) for (first, label), last in pairs if first < last)


def joined_ranges(ranges: tuple) -> tuple:
    """Ranges `(from, to, *label)` in rising order, neighbours of one label made one."""
    joined: list[tuple] = []
    for first, last, *label in ranges:
        if joined and joined[-1][1:] == (first, *label):
            first = joined.pop()[0]
        joined.append((first, last, *label))
    return tuple(joined)
