"""Finding a pattern of tokens that an output repeats over and over."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests.fields import Repetition


class RepetitionDetector:
    """Follows the tokens of one output; `push` says whether they now end with a pattern repeated often enough."""

    def __init__(self, wanted: Repetition) -> None:
        self._wanted = wanted
        self._sizes = np.arange(wanted.least_size, wanted.most_size + 1)
        self._latest = np.full(wanted.most_size, -1, np.int64)
        # By size of a pattern, how many of the last tokens equal the one that stands so far before them.
        self._num_equal = np.zeros(len(self._sizes), np.int64)

    def push(self, token_id: int) -> bool:
        """Take the next token."""
        is_equal = self._latest[-self._sizes] == token_id
        self._num_equal = np.where(is_equal, self._num_equal + 1, 0)
        self._latest = np.append(self._latest[1:], token_id)
        return bool((self._num_equal >= self._sizes * (self._wanted.count - 1)).any())
