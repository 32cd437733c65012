"""Reasoning among the tokens of an answer: between which markers it stands, and how long it may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ReasoningMarkers(NamedTuple):
    """The ids that begin and end reasoning; `is_begun` where the prompt begins it."""

    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    is_begun: bool = False


class ThinkingLimit(NamedTuple):
    """Tokens of reasoning, after which the marker that ends it is all that may follow."""

    num_tokens: int
    markers: ReasoningMarkers


class ReasoningSpan:
    """Follows the outputs of one answer; markers are no reasoning.

    `begun_at` is how many outputs stood before the reasoning that has not ended, None outside of any; `num_ended` are
    the tokens of what has.
    """

    def __init__(self, markers: ReasoningMarkers) -> None:
        self._markers, self._tail = markers, [0] * 0
        self._longest = max(len(markers.begin_ids), len(markers.end_ids))
        self.num_outputs, self.num_ended = 0, 0
        self.begun_at: int | None = 0 if markers.is_begun else None

    def follow(self, ids: Sequence[int]) -> None:
        """Take note of the next outputs."""
        for token_id in ids:
            self.num_outputs += 1
            self._tail = [*self._tail[1 - self._longest :], token_id] if self._longest > 1 else [token_id]
            marker = self._markers.begin_ids if self.begun_at is None else self._markers.end_ids
            if tuple(self._tail[-len(marker) :]) != marker:
                continue
            if self.begun_at is not None:
                self.num_ended += max(0, self.num_outputs - len(marker) - self.begun_at)
            self.begun_at, self._tail = self.num_outputs if self.begun_at is None else None, []

    @property
    def num_written_of_end(self) -> int:
        """How many ids of the marker that ends reasoning the last outputs are."""
        end_ids = self._markers.end_ids
        fits = (n for n in range(len(end_ids) - 1, 0, -1) if tuple(self._tail[-n:]) == end_ids[:n])
        return next(fits, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self.num_ended + (0 if self.begun_at is None else self.num_outputs - self.begun_at)
