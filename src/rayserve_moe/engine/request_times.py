"""When requests came, started, got tokens and ended: measured where their clients are told."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rayserve_moe.observability.metrics import RequestMetrics
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence


class RequestTimes:
    """Adds to `metrics` what the engine thread finds; all rows of a step are treated at once."""

    def __init__(self, table: RowTable) -> None:
        self.metrics = RequestMetrics()
        self._table = table

    def note_tokens(self, rows: np.ndarray, *, now: float) -> None:
        """Note that each of `rows` has got a token: its first one, or one more. `now` is of the monotonic clock."""
        if not len(rows):
            return
        table, metrics = self._table, self.metrics
        gaps = now - table.token_at[rows]
        table.token_at[rows] = now
        longest = gaps.max()
        if gaps.min() == longest:  # all got one with the step before too, and none is a first one, whose gap is NaN
            metrics.inter_token.add(float(longest), len(gaps))
            return
        is_first = np.isnan(gaps)
        metrics.time_to_first_token.add_all(now - table.accepted_at[rows[is_first]])
        metrics.inter_token.add_all(gaps[~is_first])

    def note_ends(self, ended: Iterable[tuple[Sequence, str]], *, now: float) -> None:
        """Note that choices have ended, and how (`FinishReason.kind`)."""
        metrics = self.metrics
        for sequence, kind in ended:
            metrics.finished[kind] += 1
            metrics.end_to_end.add(now - sequence.accepted_at)
            metrics.output_tokens.add(sequence.num_outputs)
            if sequence.started_at is not None:
                metrics.queue_time.add(sequence.started_at - sequence.accepted_at)
            if sequence.choice_index == 0:
                metrics.prompt_tokens.add(sequence.num_prompt_tokens)
                metrics.num_prompt_tokens += sequence.num_prompt_tokens
                metrics.num_cached_tokens += sequence.num_cached
