"""Words that an answer must not have: their last tokens are left out where all others of them stand before."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rayserve_moe.constraints.timed_guide import TimedGuide
from rayserve_moe.constraints.token_guide import EMPTY, id_bits
from rayserve_moe.requests import FinishReason
from rayserve_moe.scheduling.sequence import Guide


class WordBans(TimedGuide):
    """Follows the outputs of one choice within what another guide leaves."""

    def __init__(
        self,
        words: Sequence[tuple[int, ...]],
        *,
        num_ids: int,
        allowed_ids: Collection[int] = (),
        inner: Guide | None = None,
    ) -> None:
        """`words` are token ids each; `allowed_ids`, where there are such, are the only ids there are."""
        num_words = -(-num_ids // 32)
        self._longer = [word for word in words if len(word) > 1]
        single = id_bits({word[0] for word in words if len(word) == 1}, num_words=num_words)
        ids = allowed_ids or range(num_ids)
        self._left = id_bits(ids, num_words=num_words) & ~single
        self._inner = inner

    def _mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        mask = self._left
        if self._inner is not None:
            within = self._inner.next_mask(output_ids)
            if isinstance(within, FinishReason):
                return within
            mask = mask & within
        tail = output_ids.tolist()[-max(map(len, self._longer), default=0) :]
        completed = {word[-1] for word in self._longer if tuple(tail[-len(word) + 1 :]) == word[:-1]}
        if completed:
            mask = mask & ~id_bits(completed, num_words=len(mask))
        return mask if mask.any() else EMPTY
