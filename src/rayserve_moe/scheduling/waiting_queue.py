"""Queue of sequences that wait for a row, and the choice of the next one to admit.

Thousands may wait, and each admission compares all of them, so arrays hold their priorities and cached tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from rayserve_moe.scheduling.sequence import Sequence

CANDIDATES = 8
"""Maximum waiting sequences of each kind to match before an admission."""
MIN_PASSES, PASSES_PER_WAITING = 16, 1
"""Times that others may be admitted before the sequence at the front: a minimum, and a number per waiting sequence.

With more, evicted turns wait longer; with fewer, more turns are evicted, so that all wait (`docs/figures/fleet.md`)."""
UNMATCHED = -2
"""Number of cached tokens of a sequence that was never matched."""
PRIORITY, NUM_CACHED = range(2)
"""Columns of a sequence."""


class WaitingQueue:
    """Waiting sequences in order: preempted ones, then by priority and arrival. Other threads may iterate over it."""

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self._sequences: list[Sequence] = []
        self._columns = np.zeros((2, 64), np.int64)
        """By column and place; longer than the queue."""
        for sequence in sequences:
            self.insert(len(self), sequence)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, place: int) -> Sequence:
        return self._sequences[place]

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    @property
    def num_cached(self) -> np.ndarray:
        """Return the cached tokens of each sequence when it was last matched, int64; UNMATCHED before."""
        return self._columns[NUM_CACHED, : len(self)]

    @property
    def num_equal(self) -> int:
        """Return the number of sequences at the front that have the same priority. The queue is not empty."""
        priorities = self._columns[PRIORITY, : len(self)]
        differs = priorities != priorities[0]
        return int(differs.argmax()) if differs.any() else len(differs)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence after all sequences whose priority number is not larger."""
        not_larger = self._columns[PRIORITY, : len(self)] <= sequence.request.priority
        self.insert(int(not_larger.nonzero()[0][-1]) + 1 if not_larger.any() else 0, sequence)

    def insert(self, place: int, sequence: Sequence) -> None:
        """Insert a sequence before the one at `place`, whatever its priority."""
        count, columns = len(self), self._columns
        if count == columns.shape[1]:
            self._columns = columns = np.concatenate([columns, np.zeros_like(columns)], axis=1)
        columns[:, place + 1 : count + 1] = columns[:, place:count].copy()
        columns[:, place] = sequence.request.priority, UNMATCHED
        self._sequences.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises: ValueError if it does not wait here."""
        place, count = self._sequences.index(sequence), len(self)
        self._columns[:, place : count - 1] = self._columns[:, place + 1 : count].copy()
        del self._sequences[place]

    def clear(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()


def next_to_admit(
    waiting: WaitingQueue, *, cached_tokens: Callable[[Sequence], int], among: np.ndarray | None = None
) -> int:
    """Return the place in `waiting` of the sequence to admit next. `among` limits the choice to some places, ascending.

    Among the sequences with the priority of the front, it is the first with the most cached tokens (longest prefix
    match, as in SGLang). New conversations, which evict pages, thus wait until turns of known ones are served. To
    prevent starvation, the front is admitted if it was preempted, or passed over PASSES_PER_WAITING times for each
    waiting sequence.

    Matching all sequences takes too long, so their last counts are kept (`WaitingQueue.num_cached`). CANDIDATES each
    are matched anew: at the front, never matched before, and with the most cached tokens. `cached_tokens` returns -1
    for a sequence that has to wait for others to end.
    """
    num_waiting, places = (len(waiting), np.arange(waiting.num_equal)) if among is None else (len(among), among)
    first = int(places[0])
    queue = waiting[first].queue
    max_passes = max(MIN_PASSES, PASSES_PER_WAITING * num_waiting)
    if num_waiting == 1 or queue.num_to_recompute or queue.num_passed_over >= max_passes:
        return first
    known = waiting.num_cached
    candidates = places[_candidates(known[places])].tolist()
    counts = [cached_tokens(waiting[place]) for place in candidates]
    known[candidates] = counts
    return candidates[counts.index(max(counts))]


def _candidates(known: np.ndarray) -> np.ndarray:
    """Return the indices, ascending, of the sequences to match; `known` has their last numbers of cached tokens."""
    count = len(known)
    if count <= CANDIDATES:
        return np.arange(count)
    is_unmatched = known == UNMATCHED
    is_candidate = np.zeros(count, np.bool_)
    is_candidate[:CANDIDATES] = True
    is_candidate[is_unmatched.nonzero()[0][:CANDIDATES]] = True
    ranked = np.where(is_unmatched, 0, known) * count - np.arange(count)  # of equals the first
    is_candidate[np.argpartition(ranked, -CANDIDATES)[-CANDIDATES:]] = True
    return is_candidate.nonzero()[0]
