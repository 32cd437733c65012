"""Commit of step results into the row table, for all rows at once, and into columns of sequences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rayserve_moe.requests.columns import DRAFTED, Columns, Ragged, as_array, take
from rayserve_moe.requests.finish_reason import LENGTH, FinishReason
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import NO_ROW
from rayserve_moe.scheduling.step_plan import StepResult
from rayserve_moe.scheduling.token_probe import IS_FINITE, runs_of

NOT_FINITE = FinishReason("error", message="the model produced logits that are not finite")


MAX_MASK_IDS = 4096
"""Maximum number of ids in a returned sampling mask."""
_WIDE = f"a sampling mask has more than {MAX_MASK_IDS} tokens: lower top_k or top_p"
TOO_WIDE = FinishReason("error", message=_WIDE, source="return_sampling_mask")


def commit_tokens(
    table: RowTable, schedule: Schedule, *, result: StepResult, counts: np.ndarray | None = None
) -> tuple[np.ndarray, list[tuple[int, FinishReason]]]:
    """Append each sampled token to its row, unless the row has changed its owner since the step was planned.

    `counts` bool [S] marks the samples that become tokens; None: all do. A row whose logits were not finite gets no
    token, and ends.

    Returns: rows that got a token, int [N], repeated per token, and rows whose sequence ends, with the reason.
    """
    rows, ids, logprobs = schedule.sampling_rows, result.token_ids, result.logprobs
    ranks, columns = result.ranks, result.columns
    if DRAFTED in schedule.plan.columns:
        columns = {**columns, DRAFTED: _drafted(schedule, ids)}
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
        columns = take(columns, kept)
    places, state, wants = table.num_tokens[rows], table.state, table.wants
    if counts is not None:
        places = places + _places_in_runs(rows)
    state.token_ids[rows, places] = ids
    state.logprobs[rows, places] = logprobs
    state.ranks[rows, places] = ranks
    places += 1
    table.num_tokens[rows] = places
    if counts is not None:
        _drop_rejected(table, schedule)
    if columns:
        endings += _append_columns(table, rows, columns)
    over = places >= table.limits[rows]
    if wants.num_with_stop_ids:
        over |= (wants.stop_ids[rows] == ids[:, None]).any(axis=1)
    ended = {row for row, _ in endings}
    for i in [i for i in np.flatnonzero(over).tolist() if int(rows[i]) not in ended]:
        is_stop = ids[i] in wants.stop_ids[rows[i]]
        reason = FinishReason("stop", matched=int(ids[i])) if is_stop else LENGTH
        endings.append((int(rows[i]), reason))
    return rows, endings


def _drafted(schedule: Schedule, ids: np.ndarray) -> np.ndarray:
    """Return 1 for each sample that equals the draft after it, which is a chunk of the same row; int8 [S]."""
    chunks, drafted = schedule.plan.chunks, np.zeros(len(ids), np.int8)
    sampling = np.flatnonzero(chunks.samples)
    rows, last = chunks.rows[sampling], np.cumsum(chunks.lengths)[sampling] - 1
    drafted[:-1] = (rows[1:] == rows[:-1]) & (chunks.token_ids[last][1:] == ids[:-1])
    return drafted


def _places_in_runs(rows: np.ndarray) -> np.ndarray:
    """Return the index of each entry within its run of equal rows."""
    places = np.arange(len(rows))
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = rows[1:] != rows[:-1]
    return places - np.maximum.accumulate(np.where(begins, places, 0))


def _drop_rejected(table: RowTable, schedule: Schedule) -> None:
    """Reset the computed counts of sequences with drafts to end before their last token."""
    rows = schedule.sampling_rows[table.generations[schedule.sampling_rows] == schedule.sampling_generations]
    drafted = rows[1:][rows[1:] == rows[:-1]]
    table.num_computed[drafted] = table.num_tokens[drafted] - 1


def _append_columns(table: RowTable, rows: np.ndarray, columns: Columns) -> Iterator[tuple[int, FinishReason]]:
    """Append the entries of each sample to the columns of its sequence; yield the rows whose mask is too wide."""
    entries = {name: values.entries() if isinstance(values, Ragged) else values for name, values in columns.items()}
    for i in np.flatnonzero(table.wants.columns[rows]).tolist():
        sequence = table.sequences[rows[i]]
        assert sequence is not None, "a sample belongs to a sequence"
        sequence.evidence.columns.append(entries, i)
        if sequence.request.return_sampling_mask and len(entries["mask_ids"][i]) > MAX_MASK_IDS:
            yield int(rows[i]), TOO_WIDE


def commit_probe(table: RowTable, schedule: Schedule, *, result: StepResult) -> Iterator[int]:
    """Store a step's results at probed tokens; yield the rows of sequences whose results are not finite."""
    runs = runs_of([probed.count for probed in schedule.probed])
    for (sequence, generation, position, _), run in zip(schedule.probed, runs, strict=True):
        probe = sequence.evidence.probe
        assert probe is not None, "the sequence is probed"
        found = take(result.probed, run)
        is_own = sequence.row != NO_ROW and table.generations[sequence.row] == generation
        if not as_array(found[IS_FINITE]).all():
            if sequence.row != NO_ROW and (is_own or position < sequence.num_prompt_tokens):
                yield sequence.row
        elif position < sequence.num_prompt_tokens:
            probe.take(position, found)
            if not sequence.is_probed:
                for choice in sequence.group.choices:  # they share the probe, and may have taken rows before
                    if choice.row != NO_ROW:
                        table.end_probe(choice.row)
        elif is_own:
            sequence.evidence.output_states += list(as_array(found["hidden"]))
