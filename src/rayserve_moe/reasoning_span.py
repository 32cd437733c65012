"""Reasoning among the tokens of an answer: between which markers it stands, and how long it may be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

TokenBytes = Callable[[int], bytes]


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
    """Follows the outputs of one answer, by the bytes that they write: any tokens may spell a marker.

    A marker ends with a token, but for white space, and the tokens within it are no reasoning. `begun_at` is how many
    outputs stood before the reasoning that has not ended, None outside of any; `num_ended` are the tokens of what has.
    """

    def __init__(self, markers: ReasoningMarkers, token_bytes: TokenBytes) -> None:
        """Begin an answer; `token_bytes` returns the bytes of an id."""
        self._token_bytes, self._end_ids = token_bytes, markers.end_ids
        self._begin, self._end = (b"".join(map(token_bytes, ids)) for ids in (markers.begin_ids, markers.end_ids))
        self._max_tail = 2 * max(len(self._begin), len(self._end))
        self._tail: list[tuple[int, bytes]] = []
        """Last outputs since a marker, with their bytes."""
        self._num_tail_bytes = 0
        self.num_outputs, self.num_ended = 0, 0
        self.begun_at: int | None = 0 if markers.is_begun else None

    def follow(self, ids: Sequence[int]) -> None:
        """Take note of the next outputs."""
        for token_id in ids:
            self.num_outputs += 1
            written = self._token_bytes(token_id)
            self._tail.append((token_id, written))
            self._num_tail_bytes += len(written)
            while self._num_tail_bytes - len(self._tail[0][1]) > self._max_tail:
                self._num_tail_bytes -= len(self._tail.pop(0)[1])
            marker = self._begin if self.begun_at is None else self._end
            text = b"".join(each for _, each in self._tail)
            if not text.endswith(marker):
                text = text.rstrip()
            if not marker or not text.endswith(marker):
                continue
            if self.begun_at is not None:
                num_before = self.num_outputs - self.begun_at - self._num_tokens_from(len(text) - len(marker))
                self.num_ended += max(0, num_before)
            self.begun_at = self.num_outputs if self.begun_at is None else None
            self._tail, self._num_tail_bytes = [], 0

    @property
    def num_written_of_end(self) -> int:
        """Return how many ids of the marker that ends reasoning the last outputs are."""
        last = [token_id for token_id, _ in self._tail]
        fits = (n for n in range(len(self._end_ids) - 1, 0, -1) if tuple(last[-n:]) == self._end_ids[:n])
        return next(fits, 0)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of reasoning so far."""
        return self.num_ended + (0 if self.begun_at is None else self.num_outputs - self.begun_at)

    def _num_tokens_from(self, place: int) -> int:
        """Return how many of the last outputs begin at a byte of the tail or after it."""
        begins = itertools.accumulate((len(written) for _, written in self._tail[:-1]), initial=0)
        return sum(begin >= place for begin in begins)
