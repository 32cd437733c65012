"""Reasoning among the tokens of an answer: its span between markers, and its limit."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

TokenBytes = Callable[[int], bytes]


class ReasoningMarkers(NamedTuple):
    """Ids of the markers that begin and end reasoning."""

    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    is_begun: bool = False
    """True if the prompt begins the reasoning."""


class ThinkingLimit(NamedTuple):
    """Maximum number of reasoning tokens, after which only the end marker may follow."""

    num_tokens: int
    markers: ReasoningMarkers


class ReasoningSpan:
    """Span of reasoning in the outputs of an answer, found by bytes because any tokens may spell a marker.

    A marker ends at the end of a token, apart from white space. Its tokens do not count as reasoning.
    """

    def __init__(self, markers: ReasoningMarkers, token_bytes: TokenBytes) -> None:
        """Start an answer without outputs; `token_bytes` returns the bytes of an id."""
        self._token_bytes, self._end_ids = token_bytes, markers.end_ids
        self._begin, self._end = (
            b"".join(map(token_bytes, ids)).rstrip() for ids in (markers.begin_ids, markers.end_ids)
        )
        self._tail: deque[int] = deque(maxlen=max(len(self._begin), len(self._end), len(self._end_ids)))
        """Last outputs since the last marker; enough to spell a marker."""
        self.num_outputs, self.num_ended = 0, 0
        """Outputs so far, and tokens of ended reasoning."""
        self.begun_at: int | None = 0 if markers.is_begun else None
        """Number of outputs before the open reasoning, None outside reasoning."""

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
        """Return the number of last outputs that are the first ids of the end marker, 0 for none."""
        last = list(self._tail)
        fits = (n for n in range(len(self._end_ids) - 1, 0, -1) if tuple(last[-n:]) == self._end_ids[:n])
        return next(fits, 0)

    @property
    def num_tokens(self) -> int:
        """Return the number of reasoning tokens so far."""
        return self.num_ended + (0 if self.begun_at is None else self.num_outputs - self.begun_at)

    def _num_tokens_from(self, start: int) -> int:
        """Return the number of last outputs that begin at byte `start` of the tail or later."""
        begins = itertools.accumulate((len(self._token_bytes(token_id)) for token_id in self._tail), initial=0)
        return sum(begin >= start for begin in itertools.islice(begins, len(self._tail)))
