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
        table = self._table
        before = table.token_at[rows]
        table.token_at[rows] = now
        is_first = np.isnan(before)
        if is_first.any():
            self.metrics.time_to_first_token.add(now - table.accepted_at[rows[is_first]])
            before = before[~is_first]
        if len(before):
            self.metrics.inter_token.add(now - before)

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
