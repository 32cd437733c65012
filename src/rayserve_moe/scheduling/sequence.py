"""One choice of one request while it is being generated: the only mutable view of it."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests import FinishReason, GenerationRequest

NO_ROW = -1


class Sequence:
    """Tokens, pages and row of one choice.

    Positions fall into `[computed | known, not computed | free]`: `num_computed` tokens have their KV in `pages`,
    `num_tokens` are known. A sequence samples when its last known token is computed.
    """

    def __init__(
        self, request: GenerationRequest, choice_index: int, *, seed: int, stop_token_ids: frozenset[int]
    ) -> None:
        self.request = request
        self.choice_index = choice_index
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.num_prompt_tokens = len(request.prompt_ids)
        self._tokens = np.zeros(self.num_prompt_tokens + request.sampling.max_new_tokens, np.int32)
        self._tokens[: self.num_prompt_tokens] = request.prompt_ids
        self.num_tokens = self.num_prompt_tokens
        self.num_computed = 0
        self.num_cached = 0
        self.pages: list[int] = []
        self.page_generations: list[int] = []
        self.row = NO_ROW
        self.finish: FinishReason | None = None
        self.followers: list[Sequence] = []
        self.num_recomputed = 0
        self.sampled_rows: np.ndarray | None = None

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed >= self.num_prompt_tokens

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids at positions `[start, stop)`, int32."""
        return self._tokens[start:stop]

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def hold(self, pages: list[int], generations: list[int]) -> None:
        """Add pages at the end."""
        self.pages += pages
        self.page_generations += generations

    def let_go(self) -> list[int]:
        """Give up all pages and with them everything computed; returns the pages for release."""
        pages, self.pages, self.page_generations = self.pages, [], []
        self.num_computed = 0
        return pages

    def finish_after(self, token_id: int) -> FinishReason | None:
        """Why generation ends with the token just appended, or None."""
        if token_id in self.stop_token_ids:
            return FinishReason("stop", matched=token_id)
        if self.num_outputs >= self.request.sampling.max_new_tokens:
            return FinishReason("length")
        return None
