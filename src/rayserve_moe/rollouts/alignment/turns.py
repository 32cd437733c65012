"""Joins the routing of a conversation from the answers of its turns, each of which may hold only new rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayserve_moe.replay.encoding.ranges import label_ranges, labels_of, missing_ranges, presence, routing_until
from rayserve_moe.requests.records import RoutedExperts


def join_turns(turns: Sequence[RoutedExperts], *, with_placeholder: bool = False) -> RoutedExperts:
    """Return the rows of all turns, each at its position.

    Where turns overlap, their rows must agree; a row that is missing in one is taken from another. A position that no
    turn reaches before a later one begins is a gap. ValueError for both. With `with_placeholder` the last row of
    every turn, not yet computed, is left out, so that the next turn provides it.
    """
    if not turns:
        raise ValueError("there is no turn to join")
    if with_placeholder:
        turns = [routing_until(turn, turn.start + len(turn.rows) - 1) for turn in turns]
    start, end = turns[0].start, max(turn.start + len(turn.rows) for turn in turns)
    like = turns[0].rows
    rows, present = np.zeros((end - start, *like.shape[1:]), like.dtype), np.zeros(end - start, np.bool_)
    source, version = np.full((2, end - start), "", object)
    reached = start
    for turn in turns:
        _check_fits(turn, like, start, reached)
        here = slice(turn.start - start, turn.start - start + len(turn.rows))
        given = presence(turn)
        _check_agrees(turn, rows[here], present[here] & given)
        fresh = given & ~present[here]
        first_seen = np.arange(turn.start, turn.start + len(turn.rows)) >= reached
        rows[here][fresh] = turn.rows[fresh]
        present[here] |= fresh
        for labels, ranges in ((source, turn.source), (version, turn.weight_version)):
            labelled = fresh | first_seen
            labels[here][labelled] = labels_of(ranges, turn.start, count=len(turn.rows))[labelled]
        reached = max(reached, turn.start + len(turn.rows))
    return RoutedExperts(
        rows, start, missing_ranges(present, start), label_ranges(source, start), label_ranges(version, start)
    )


def _check_fits(turn: RoutedExperts, like: np.ndarray, start: int, reached: int) -> None:
    if turn.rows.shape[1:] != like.shape[1:] or turn.rows.dtype != like.dtype:
        raise ValueError("turns have rows of different models")
    if turn.start < start:
        raise ValueError(f"a turn starts at position {turn.start}, before the first one at {start}")
    if turn.start > reached:
        raise ValueError(f"no turn has rows for positions {reached} to {turn.start - 1}")


def _check_agrees(turn: RoutedExperts, before: np.ndarray, both: np.ndarray) -> None:
    differs = both & (before != turn.rows).any(axis=(1, 2))
    if differs.any():
        raise ValueError(f"two turns disagree on the row of position {turn.start + int(np.argmax(differs))}")
