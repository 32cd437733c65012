"""Verification of drafts: their chunks in a step, and the samples that count in its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.rank_step import RankStep, StepLimits
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.step_plan import AWAITED, DRAFTED, LAST_SAMPLED, StepResult

Draft = Callable[[np.ndarray], Mapping[int, np.ndarray]]
"""Returns, by row, the drafts that may follow its known tokens, int32 [N], given the decoding rows."""

NO_DRAFTS = np.zeros(0, np.int32)


def add_decoding(steps: list[RankStep], draft: Draft, *, limits: StepLimits) -> int:
    """Add the decoding sequences to each rank's step, with their drafts; return the maximum number of drafts.

    The number of drafts is limited by the single tokens and samples of a rank, by the limit of each sequence, and by
    its pages and free pages. No sequence is preempted for drafts.
    """
    has_prompts = any(not is_single for step in steps for is_single, _ in _chunks(step))
    max_singles = limits.num_rows if has_prompts else max(limits.num_rows, limits.verify_rows)
    rows_of_ranks = [step.decoding() for step in steps]
    drafts = draft(np.concatenate([rows for rows, _ in rows_of_ranks]))
    max_drafts = 0
    for step, (rows, starts) in zip(steps, rows_of_ranks, strict=True):
        free = max_singles - len(rows) - sum(is_single or samples for is_single, samples in _chunks(step))
        found: dict[int, np.ndarray] = {}
        for i in range(len(rows)) if drafts else ():
            row = int(rows[i])
            if (drafted := drafts.get(row)) is not None:
                room = int(step.rank.table.targets[row] - starts[i]) - 1
                if step.rank.entry_tokens:
                    # A token at a multiple writes an entry, and is certain therefore.
                    room = min(room, step.rank.entry_tokens - 1 - int(starts[i]) % step.rank.entry_tokens)
                count = _grow(step, row, max(0, min(len(drafted), free, room)), page_size=limits.page_size)
                found[row] = drafted[: max(0, count)]
                free -= len(found[row])
        max_drafts = max([max_drafts, *map(len, found.values())])
        _add(step, rows, starts, found=found)
    return max_drafts


def _chunks(step: RankStep) -> Iterator[tuple[bool, bool]]:
    """Yield, for each prompt chunk of a step, whether it is a single token and whether it samples."""
    for run in step.runs:
        yield bool(run.lengths[0] == 1 and run.demand is None), bool(run.samples[0])


def _grow(step: RankStep, row: int, count: int, *, page_size: int) -> int:
    """Give a decoding row a page for up to `count` drafts after its next token; return the number of drafts that fit.

    At most a single page is added, because states are sized for that.
    """
    rank, table = step.rank, step.rank.table
    used, held = int(table.num_computed[row]) + 1, int(table.num_pages[row])
    count = min(count, table.state.page_ids.shape[1] * page_size - used)
    missing = min(1, -(-(used + count) // page_size) - held)
    pages = rank.take_pages(missing) if missing > 0 else None
    if pages is not None:
        table.extend(row, pages, generations=rank.allocator.generations[pages])
        step.set_pages(np.array([row]), np.array([held]), page_ids=pages)
    return min(count, int(table.capacities[row]) - used)


def _add(step: RankStep, rows: np.ndarray, starts: np.ndarray, *, found: Mapping[int, np.ndarray]) -> None:
    """Add the last token of each row and the drafts `found` for it; `starts` are upper bounds for awaited rows."""
    if not len(rows):
        return
    table = step.rank.table
    are_awaited = is_awaited(table, rows)
    drafts = [found.get(row, NO_DRAFTS) for row in rows.tolist()]
    lengths = np.array([1 + len(of_row) for of_row in drafts])
    depths = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    token_ids = np.full(len(depths), LAST_SAMPLED, np.int32)
    token_ids[depths > 0] = np.concatenate(drafts)
    first, way = (np.repeat(each, lengths) for each in (np.where(are_awaited, AWAITED, starts), 1 - 2 * are_awaited))
    step.add_singles(
        np.repeat(rows, lengths),
        first + way * depths,
        token_ids=token_ids,
        verifies=len(found) > 0 or bool(are_awaited.any()),
    )
    table.num_computed[rows] = starts + lengths


def samples_that_count(table: RowTable, schedule: Schedule, *, result: StepResult) -> np.ndarray:
    """Return the samples of a step with drafts or awaited chunks that become tokens, bool [S].

    They belong to sequences still in their row. A sample after a draft counts if the previous sample counts, equals the
    draft, and does not end the sequence.
    """
    chunks = schedule.plan.chunks
    rows, ids = schedule.sampling_rows, result.token_ids
    is_draft = follows(rows)
    ends = (table.wants.stop_ids[rows] == ids[:, None]).any(axis=1) | ~result.finite
    drafted = chunks.token_ids[_last_tokens(chunks.lengths, chunks.samples)]
    is_right = (drafted == np.roll(ids, 1)) & ~np.roll(ends, 1)
    counts = np.ones(len(rows), np.bool_)
    for _ in range(chunks.max_drafts):
        counts = ~is_draft | (is_right & np.roll(counts, 1))
    return counts & (table.generations[rows] == schedule.sampling_generations)


def resolve_awaited(table: RowTable, schedule: Schedule, *, before: Schedule, result: StepResult) -> Schedule:
    """Return the schedule with start positions and drafts filled in from the committed step `before`.

    Its plan and the `num_computed` of `table`, which this updates, are as if the step had been planned after the
    commit. Samples of sequences that have left their rows do not count (`samples_that_count`).
    """
    chunks = schedule.plan.chunks
    (awaited,) = np.nonzero(chunks.starts <= AWAITED)
    rows, depths = chunks.rows[awaited], AWAITED - chunks.starts[awaited]
    starts, token_ids = chunks.starts.copy(), chunks.token_ids.copy()
    generations = np.full(len(table.generations), -1, np.int64)
    generations[schedule.sampling_rows] = schedule.sampling_generations
    is_there = table.generations[rows] == generations[rows]
    starts[awaited] = np.where(is_there, table.num_tokens[rows] - 1 + depths, 0)
    lengths = np.bincount(rows[is_there], minlength=len(generations))
    there = np.flatnonzero(lengths)
    table.num_computed[there] = table.num_tokens[there] - 1 + lengths[there]
    tokens = (np.cumsum(chunks.lengths) - 1)[awaited]
    is_draft = token_ids[tokens] == DRAFTED
    if is_draft.any():
        assert result.drafts is not None, "drafts were requested"
        locations = np.zeros(len(generations), np.intp)
        drafted = before.sampling_rows
        of_drafted = drafted[np.concatenate([[True], drafted[1:] != drafted[:-1]])]
        locations[of_drafted] = np.arange(len(of_drafted))
        token_ids[tokens[is_draft]] = result.drafts[locations[rows[is_draft]], depths[is_draft] - 1]
    chunks = replace(chunks, starts=starts, token_ids=token_ids)
    return replace(schedule, plan=replace(schedule.plan, chunks=chunks), is_awaited=False)


def tokens_that_count(schedule: Schedule, counts: np.ndarray) -> np.ndarray:
    """Return the tokens of a plan that belong to their sequences, bool [num_tokens]; `counts` is for its samples."""
    chunks = schedule.plan.chunks
    belongs = np.ones(len(chunks.token_ids), np.bool_)
    belongs[_last_tokens(chunks.lengths, chunks.samples)] = counts
    return belongs


def follows(rows: np.ndarray) -> np.ndarray:
    """Return True for samples taken after a draft, whose row equals the previous sample's, bool [S]."""
    after = np.zeros(len(rows), np.bool_)
    after[1:] = rows[1:] == rows[:-1]
    return after


def is_awaited(table: RowTable, rows: np.ndarray) -> np.ndarray:
    """Return True for decoding rows whose last step has not come back, bool [N]; only devices know their position."""
    return table.num_computed[rows] >= table.num_tokens[rows]


def _last_tokens(lengths: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return the indices in a plan of the last tokens of sampling chunks."""
    return (np.cumsum(lengths) - 1)[samples]
