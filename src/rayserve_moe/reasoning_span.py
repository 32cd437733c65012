"""Reasoning among the tokens of an answer: between which markers it stands, and how long it may be."""

from __future__ import annotations

import itertools
from collections import deque
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
        self._begin, self._end = (
            b"".join(map(token_bytes, ids)).rstrip() for ids in (markers.begin_ids, markers.end_ids)
        )
        self._tail: deque[int] = deque(maxlen=max(len(self._begin), len(self._end), len(self._end_ids)))
        """Last outputs since a marker, as many as can spell one."""
        self.num_outputs, self.num_ended = 0, 0
        self.begun_at: int | None = 0 if markers.is_begun else None

    def follow(self, ids: Sequence[int]) -> None:
        """Record the next outputs."""
        for token_id in ids:
            self.num_outputs += 1
            self._tail.append(token_id)
            marker = self._begin if self.begun_at is None else self._end
            if not self._token_bytes(token_id).rstrip().endswith(marker[-1:]):
                continue
            text = b"".join(map(self._token_bytes, self._tail)).rstrip()
            if not marker or not text.endswith(marker):
                continue
            if self.begun_at is not None:
                num_before = self.num_outputs - self.begun_at - self._num_tokens_from(len(text) - len(marker))
                self.num_ended += max(0, num_before)
            self.begun_at = self.num_outputs if self.begun_at is None else None
            self._tail.clear()

    @property
    def num_written_of_end(self) -> int:
        """Return how many ids of the marker that ends reasoning the last outputs are."""
        last = list(self._tail)
        fits = (n for n in range(len(self._end_ids) - 1, 0, -1) if tuple(last[-n:]) == self._end_ids[:n])
        return next(fits, 0)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of reasoning so far."""
        return self.num_ended + (0 if self.begun_at is None else self.num_outputs - self.begun_at)

    def _num_tokens_from(self, place: int) -> int:
        """Return how many of the last outputs begin at a byte of the tail or after it."""
        begins = itertools.accumulate((len(self._token_bytes(token_id)) for token_id in self._tail), initial=0)
        return sum(begin >= place for begin in itertools.islice(begins, len(self._tail)))
