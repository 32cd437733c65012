"""A proposer that knows what will be sampled, and is right as often as it is told to be."""

from __future__ import annotations

import numpy as np

from rayserve_moe.scheduling.sequence import Sequence
from tests.support.engine.outputs import Outcomes


class Oracle:
    """Drafts the tokens of `known` answers; each is right with `share`, else another token of `vocab_size`.

    What it drafts at a position of a choice depends on nothing else: a second run drafts the same.
    """

    name = "oracle"

    def __init__(self, known: Outcomes, *, share: float, vocab_size: int, seed: int = 0) -> None:
        self._known, self._share, self._vocab_size, self._seed = known, share, vocab_size, seed

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """What follows, as it is known or falsified."""
        key = (sequence.request.request_id, sequence.choice_index)
        first = sequence.num_outputs
        answer = np.asarray(self._known[key].ids[first : first + count], np.int32)
        generator = np.random.default_rng([self._seed, *key[0].encode(), sequence.choice_index, first])
        wrong = (answer + generator.integers(1, self._vocab_size, len(answer))) % self._vocab_size
        return np.where(generator.random(len(answer)) < self._share, answer, wrong).astype(np.int32)

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""
