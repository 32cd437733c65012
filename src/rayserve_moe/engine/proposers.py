"""Where drafts come from: a sequence's own tokens, or other answers to its prompt."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Protocol

import numpy as np

from rayserve_moe.config.settings import SpeculationSettings
from rayserve_moe.scheduling.proposals import best_continuation, continuation
from rayserve_moe.scheduling.sequence import Sequence

MOST_PROMPTS = 256
MOST_ANSWERS = 64
"""Prompts whose finished answers are kept, and answers kept of each; the oldest go first."""


class Proposer(Protocol):
    """Drafts tokens for sequences. Any drafts are right to give: wrong ones only cost time."""

    name: str

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Up to `count` tokens, int32, that may follow those that the sequence knows."""
        ...

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        ...


class NgramProposer:
    """Drafts what followed the last tokens of a sequence before, in its prompt or output (prompt lookup decoding)."""

    name = "ngram"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._lengths = {"shortest": settings.shortest_match, "longest": settings.longest_match}

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """The continuation of its longest end that stood before."""
        known = sequence.token_ids[: sequence.num_tokens]
        return continuation(known, known, count=count, **self._lengths)

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class SiblingProposer:
    """Drafts from other answers to the same prompt, running or finished, else from the sequence itself."""

    name = "siblings"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._lengths = {"shortest": settings.shortest_match, "longest": settings.longest_match}
        self._longest = settings.longest_match
        self._finished: OrderedDict[Hashable, deque[np.ndarray]] = OrderedDict()

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """The continuation of its longest end that stands in another answer, else of the one that stood before."""
        known = sequence.token_ids[: sequence.num_tokens]
        running = (self._answer(other) for other in sequence.choices if other is not sequence and other.finish is None)
        texts = [*self._finished.get(_prompt_of(sequence), ()), *running]
        found = best_continuation(known, texts, count=count, **self._lengths)
        return found if len(found) else continuation(known, known, count=count, **self._lengths)

    def end(self, sequence: Sequence) -> None:
        """Keep its answer for those that come after it."""
        answers = self._finished.setdefault(_prompt_of(sequence), deque(maxlen=MOST_ANSWERS))
        answers.append(self._answer(sequence).copy())
        self._finished.move_to_end(_prompt_of(sequence))
        while len(self._finished) > MOST_PROMPTS:
            self._finished.popitem(last=False)

    def _answer(self, sequence: Sequence) -> np.ndarray:
        """The outputs of a sequence, after as much of its prompt as an end can reach into."""
        first = max(0, sequence.num_prompt_tokens - self._longest)
        return sequence.token_ids[first : sequence.num_tokens]


def _prompt_of(sequence: Sequence) -> Hashable:
    """What answers are kept under: those of another salt are none of its business."""
    request = sequence.request
    return request.cache_salt, request.prompt_ids.tobytes()


PROPOSERS = {"NGRAM": NgramProposer, "SIBLINGS": SiblingProposer}
"""By `speculative_algorithm`."""
