"""The end of reasoning that is longer than a request allows: then nothing may follow but the marker that ends it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rayserve_moe.constraints.timed_guide import TimedGuide
from rayserve_moe.constraints.token_guide import EMPTY, id_bits
from rayserve_moe.reasoning_span import ReasoningSpan, ThinkingLimit
from rayserve_moe.requests import FinishReason
from rayserve_moe.scheduling.sequence import Guide


class ThinkingBudget(TimedGuide):
    """Follows the outputs of one choice within what another guide leaves.

    Tokens count from the start of the output where the prompt has begun reasoning, else from the marker that begins it.
    """

    def __init__(
        self, limit: ThinkingLimit, *, num_ids: int, allowed_ids: Collection[int] = (), inner: Guide | None = None
    ) -> None:
        """`allowed_ids`, where there are such, are the only ids there are."""
        self._limit, self._inner, self._allowed_ids = limit, inner, frozenset(allowed_ids)
        self._span = ReasoningSpan(limit.markers)
        self._any = np.full(-(-num_ids // 32), -1, np.int32)

    def _mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        span = self._span
        span.follow(output_ids[span.num_outputs :].tolist())
        within = self._any if self._inner is None else self._inner.next_mask(output_ids)
        if isinstance(within, FinishReason) or span.begun_at is None:
            return within
        if span.num_outputs - span.begun_at < self._limit.num_tokens:
            return within
        # A marker that is begun is gone on with: broken off, it would be reasoning beyond the limit.
        forced = self._limit.markers.end_ids[span.num_written_of_end]
        if self._allowed_ids and forced not in self._allowed_ids:
            return EMPTY
        return id_bits((forced,), num_words=len(self._any))
