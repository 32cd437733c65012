"""Writing what a step sampled into the row table, for all rows at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayserve_moe.requests import FinishReason, TopLogprobs
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.step_plan import StepResult

NOT_FINITE = FinishReason("error", message="the model produced logits that are not finite")


class Committed(NamedTuple):
    """Rows that got a token, int [N]; rows whose sequence ends with it, and why."""

    rows: np.ndarray
    endings: list[tuple[int, FinishReason]]


def commit_tokens(table: RowTable, schedule: Schedule, *, result: StepResult) -> Committed:
    """Append each sampled token to its row, unless the row has changed hands since the step was planned.

    A row whose logits were not finite gets no token, and ends.
    """
    rows, ids, logprobs = schedule.sampling_rows, result.token_ids, result.logprobs
    ranks, top = result.ranks, result.top
    endings: list[tuple[int, FinishReason]] = []
    all_finite = np.count_nonzero(ranks) == len(rows)
    if table.num_departures != schedule.num_departures or not all_finite:
        kept = table.generations[rows] == schedule.sampling_generations
        endings = [(int(row), NOT_FINITE) for row in rows[kept & ~result.finite]]
        kept &= result.finite
        rows, ids, logprobs, ranks = rows[kept], ids[kept], logprobs[kept], ranks[kept]
        top = top and TopLogprobs(top.token_ids[kept], top.logprobs[kept])
    places = table.num_tokens[rows]
    table.token_ids[rows, places] = ids
    table.logprobs[rows, places] = logprobs
    table.ranks[rows, places] = ranks
    places += 1
    table.num_tokens[rows] = places
    if top is not None:
        _note_top(table, rows, top)
    over = places >= table.limits[rows]
    if table.num_with_stop_ids:
        over |= (table.stop_ids[rows] == ids[:, None]).any(axis=1)
    for i in np.flatnonzero(over).tolist():
        is_stop = ids[i] in table.stop_ids[rows[i]]
        reason = FinishReason("stop", matched=int(ids[i])) if is_stop else FinishReason("length")
        endings.append((int(rows[i]), reason))
    return Committed(rows, endings)


def _note_top(table: RowTable, rows: np.ndarray, top: TopLogprobs) -> None:
    """Leave the likeliest tokens of each sample with the sequences that want any."""
    counts = table.num_top[rows]
    for i in np.flatnonzero(counts).tolist():
        sequence, count = table.sequences[rows[i]], counts[i]
        assert sequence is not None, "a sample belongs to a sequence"
        sequence.top_of_outputs.append((top.token_ids[i, :count], top.logprobs[i, :count]))
