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


class TreeOracle:
    """Drafts random trees of at most `levels`; of each token that follows a right one `share` is in the tree.

    The tree of a choice at a position depends on nothing else. Some drafts stand in it twice.
    """

    name = "oracle"

    def __init__(self, known: Outcomes, *, share: float, vocab_size: int, levels: int, seed: int = 0) -> None:
        self._known, self._share, self._vocab_size, self._levels, self._seed = known, share, vocab_size, levels, seed

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """A tree around what follows."""
        key = (sequence.request.request_id, sequence.choice_index)
        first = sequence.num_outputs
        answer = self._known[key].ids[first : first + self._levels]
        generator = np.random.default_rng([self._seed, *key[0].encode(), sequence.choice_index, first])
        is_drafted = generator.random(self._levels) < self._share
        drafts, depths, is_right = [], [0], [True]
        while len(drafts) < count:
            follows = int(generator.choice([i for i, depth in enumerate(depths) if depth < self._levels]))
            depth = depths[follows]
            can_be_right = is_right[follows] and depth < len(answer) and is_drafted[depth]
            token = int(generator.integers(self._vocab_size))
            token = answer[depth] if can_be_right and generator.random() < 0.5 else token
            drafts.append((token, follows))
            depths.append(depth + 1)
            is_right.append(is_right[follows] and depth < len(answer) and token == answer[depth])
        return np.array(drafts, np.int32).reshape(-1, 2)

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""
