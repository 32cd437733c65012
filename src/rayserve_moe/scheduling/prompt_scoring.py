"""Log-probs of a prompt's own tokens, as far as the steps of its chunks have brought them."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests import GenerationRequest, PromptScores, TopLogprobs


class PromptScoring:
    """What is found of one request's prompt scores; all of its choices share it, and a preemption takes nothing away.

    The token at position i is scored where the one before it is computed. `frontier` is the first position that still
    has to be computed for that: a cached prefix may reach up to it. All scores are of the weights `weight_version`.
    """

    def __init__(self, request: GenerationRequest, *, weight_version: str = "") -> None:
        assert request.score_prompt_from is not None, "nothing is to be scored"
        self._prompt_ids = np.asarray(request.prompt_ids, np.int32)
        self._first, num_top = request.score_prompt_from, request.num_top_logprobs
        count = len(self._prompt_ids) - 1 - self._first
        self._logprobs = np.zeros(count, np.float32)
        self._ranks = np.zeros(count, np.int32)
        self._top = TopLogprobs(np.zeros((count, num_top), np.int32), np.zeros((count, num_top), np.float32))
        self._is_found = np.zeros(count, np.bool_)
        self._weight_version = weight_version

    @property
    def wants_top(self) -> bool:
        return self._top.token_ids.shape[1] > 0

    @property
    def is_complete(self) -> bool:
        return bool(self._is_found.all())

    @property
    def frontier(self) -> int:
        return self._first + self._num_found

    def targets(self, start: int, stop: int) -> tuple[int, np.ndarray]:
        """What a chunk over positions `[start, stop)` is to score: the first position to score after, and the tokens
        that follow it and its successors, int32."""
        first, last = max(start, self.frontier), min(stop, len(self._prompt_ids) - 1)
        return first, self._prompt_ids[first + 1 : max(first, last) + 1]

    def take(self, first: int, logprobs: np.ndarray, *, ranks: np.ndarray, top: TopLogprobs | None) -> None:
        """Take over what the targets after positions `first ...` came to; `top` [N, n or more], where it is wanted."""
        places = slice(first - self._first, first - self._first + len(logprobs))
        self._logprobs[places] = logprobs
        self._ranks[places] = ranks
        self._is_found[places] = True
        if top is not None:
            num_top = self._top.token_ids.shape[1]
            self._top.token_ids[places] = top.token_ids[:, :num_top]
            self._top.logprobs[places] = top.logprobs[:, :num_top]

    def scores(self) -> PromptScores:
        """All scores up to the first that is not found."""
        count = self._num_found
        top = TopLogprobs(self._top.token_ids[:count], self._top.logprobs[:count]) if self.wants_top else None
        logprobs, ranks = self._logprobs[:count].copy(), self._ranks[:count].copy()
        return PromptScores(self._first, logprobs, ranks, top, self._weight_version)

    def change_weights(self, weight_version: str) -> None:
        """Go on under other weights: unless all scores are found, they are found anew."""
        if not self.is_complete:
            self._is_found[:] = False
            self._weight_version = weight_version

    @property
    def _num_found(self) -> int:
        return len(self._is_found) if self.is_complete else int(np.argmin(self._is_found))
