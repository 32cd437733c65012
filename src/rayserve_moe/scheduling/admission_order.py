"""Which waiting sequence goes next: one that finds much of its prompt cached, without letting others starve."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Queued
from itertools import islice

from rayserve_moe.scheduling.sequence import Sequence

CANDIDATES = 8
"""Waiting sequences, from the front, that are compared."""

MAX_PASSED_OVER = 16
"""Times a sequence at the front lets others go first."""


def next_to_admit(waiting: Queued[Sequence], *, cached_tokens: Callable[[Sequence], int]) -> int:
    """Return the index in `waiting` (not empty) of the sequence to admit next.

    It is the first among those with the most cached tokens. The front goes first once it was passed over
    MAX_PASSED_OVER times, or when it was preempted: it has waited before.
    """
    front = waiting[0]
    if len(waiting) == 1 or front.num_to_recompute or front.num_passed_over >= MAX_PASSED_OVER:
        return 0
    candidates = list(islice(waiting, CANDIDATES))
    cached = [cached_tokens(sequence) for sequence in candidates]
    return cached.index(max(cached))
