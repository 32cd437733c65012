"""Writes the results of a step into the row table, for all rows at once, and into prompt scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rayserve_moe.requests.finish_reason import LENGTH, FinishReason
from rayserve_moe.requests.records import TopLogprobs
from rayserve_moe.requests.token_evidence import SampleSupport
from rayserve_moe.scheduling.inspected_tokens import commit_inspections
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import NO_ROW
from rayserve_moe.scheduling.step_plan import StepResult

NOT_FINITE = FinishReason("error", message="the model produced logits that are not finite")


MOST_SUPPORT = 4096
"""Tokens that truncation may leave to a sample whose support is returned."""
_WIDE = f"truncation left more than {MOST_SUPPORT} tokens to a sample: lower top_k, or top_p"
TOO_WIDE = FinishReason("error", message=_WIDE, source="return_sampling_mask")


def commit_tokens(
    table: RowTable, schedule: Schedule, *, result: StepResult, counts: np.ndarray | None = None
) -> tuple[np.ndarray, list[tuple[int, FinishReason]]]:
    """Append each sampled token to its row, unless the row has another owner since the step was planned.

    Of the samples only those that `counts` says become tokens, where it is given. Returns the rows that got a token,
    int [N], several times where they got several, and the rows whose sequence ends, with the reason. A row whose logits
    were not finite gets no token, and ends.
    """
    rows, ids, logprobs = schedule.sampling_rows, result.token_ids, result.logprobs
    ranks, top, evidence = result.ranks, result.top, result.evidence
    endings: list[tuple[int, FinishReason]] = []
    kept = np.ones(len(rows), np.bool_)
    all_finite = np.count_nonzero(ranks) == len(rows)
    if table.num_departures != schedule.num_departures or not all_finite or counts is not None:
        kept = table.generations[rows] == schedule.sampling_generations
        if counts is not None:
            kept &= counts
        endings = [(int(row), NOT_FINITE) for row in rows[kept & ~result.finite]]
        kept &= result.finite
        rows, ids, logprobs, ranks = rows[kept], ids[kept], logprobs[kept], ranks[kept]
        top = top and TopLogprobs(top.token_ids[kept], top.logprobs[kept])
        evidence = None if evidence is None else evidence[kept]
    places = table.num_tokens[rows]
    if counts is not None:
        places = places + _places_in_runs(rows)
    table.token_ids[rows, places] = ids
    table.logprobs[rows, places] = logprobs
    table.ranks[rows, places] = ranks
    places += 1
    table.num_tokens[rows] = places
    if counts is not None:
        _drop_rejected(table, schedule)
    if top is not None:
        _note_top(table, rows, top)
    if evidence is not None:
        _note_evidence(table, rows, evidence)
    if result.support is not None:
        endings += _note_support(table, rows, support=_of_kept(result.support, kept))
    over = places >= table.limits[rows]
    if table.num_with_stop_ids:
        over |= (table.stop_ids[rows] == ids[:, None]).any(axis=1)
    ended = {row for row, _ in endings}
    for i in [i for i in np.flatnonzero(over).tolist() if int(rows[i]) not in ended]:
        is_stop = ids[i] in table.stop_ids[rows[i]]
        reason = FinishReason("stop", matched=int(ids[i])) if is_stop else LENGTH
        endings.append((int(rows[i]), reason))
    return rows, endings


def _places_in_runs(rows: np.ndarray) -> np.ndarray:
    """How far each entry is into its run of equal rows."""
    places = np.arange(len(rows))
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = rows[1:] != rows[:-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0))


def _drop_rejected(table: RowTable, schedule: Schedule) -> None:
    """After the tokens of a step with drafts: what was computed of the sequences ends before their last token."""
    rows = schedule.sampling_rows[table.generations[schedule.sampling_rows] == schedule.sampling_generations]
    drafted = rows[1:][rows[1:] == rows[:-1]]
    table.num_computed[drafted] = table.num_tokens[drafted] - 1


def _note_top(table: RowTable, rows: np.ndarray, top: TopLogprobs) -> None:
    """Append the likeliest tokens of each sample to the sequences that want them."""
    counts = table.num_top[rows]
    for i in np.flatnonzero(counts).tolist():
        sequence, count = table.sequences[rows[i]], counts[i]
        assert sequence is not None, "a sample belongs to a sequence"
        sequence.top_of_outputs.append((top.token_ids[i, :count], top.logprobs[i, :count]))


def _note_evidence(table: RowTable, rows: np.ndarray, evidence: np.ndarray) -> None:
    """Append the evidence of each sample to the sequences that ask for it."""
    for i in np.flatnonzero(table.are_held[rows]).tolist():
        sequence = table.sequences[rows[i]]
        assert sequence is not None, "a sample belongs to a sequence"
        if sequence.asked is not None:
            sequence.evidence_of_outputs.append(evidence[i, : 1 + len(sequence.request.logprob_token_ids)])


def _of_kept(support: SampleSupport, kept: np.ndarray) -> list[tuple[np.ndarray, float]]:
    each = zip(np.split(support.token_ids, np.cumsum(support.counts)[:-1]), support.logprobs.tolist(), strict=True)
    return [one for one, is_kept in zip(each, kept.tolist(), strict=True) if is_kept]


def _note_support(
    table: RowTable, rows: np.ndarray, *, support: list[tuple[np.ndarray, float]]
) -> Iterator[tuple[int, FinishReason]]:
    """Append the support of each sample to the sequences that ask for it; yields those for which it is too much."""
    for row, one in zip(rows.tolist(), support, strict=True):
        sequence = table.sequences[row]
        if sequence is not None and sequence.request.return_sampling_mask:
            sequence.support_of_outputs.append(one)
            if len(one[0]) > MOST_SUPPORT:
                yield row, TOO_WIDE


def commit_evidence(table: RowTable, schedule: Schedule, *, result: StepResult) -> Iterator[int]:
    """Store what a step has found of tokens besides samples; yields the rows of sequences where that is not finite."""
    yield from _commit_scores(schedule, result)
    yield from commit_inspections(table, schedule.inspected, result=result)


def _commit_scores(schedule: Schedule, result: StepResult) -> Iterator[int]:
    first = 0
    for sequence, position, count in schedule.scored:
        assert result.scores is not None and sequence.scoring is not None, "scores were asked for"
        part, first = slice(first, first + count), first + count
        logprobs, ranks, top = result.scores.logprobs[part], result.scores.ranks[part], result.scores.top
        if np.isfinite(logprobs).all():
            wanted = top and TopLogprobs(top.token_ids[part], top.logprobs[part])
            wanted = wanted if sequence.scoring.wants_top else None
            sequence.scoring.take(position, logprobs, ranks=ranks, top=wanted)
        elif sequence.row != NO_ROW:
            yield sequence.row
