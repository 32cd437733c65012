"""Collecting one step's chunks, changes and sampling parameters of new rows, then freezing them into a StepPlan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.requests import SamplingParams
from rayserve_moe.scheduling.chunk_demands import ChunkDemand, block_work_of
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence, chunk_demand
from rayserve_moe.scheduling.step_plan import (
    NO_BLOCK_WORK,
    NO_NEW_ROWS,
    NO_PAGE_CHANGES,
    WITHHELD,
    PageTableChanges,
    RowAdjustment,
    RowFloats,
    RowIntegers,
    RowSampling,
    StepPlan,
)


@dataclass(frozen=True)
class Schedule:
    """A plan, and what is needed to commit its result.

    `sampling_rows` are the rows of the chunks that sample, `sampling_generations` the generations of those rows,
    `num_departures` how many sequences had left a row by then. `completed` are the sequences whose last known token is
    computed by a longer chunk of this step, with their row's generation; `scored` those with prompt tokens to score,
    each with the first position that is scored after and the number of scores, in the plan's order.
    """

    plan: StepPlan
    sampling_rows: np.ndarray
    sampling_generations: np.ndarray
    num_departures: int
    completed: tuple[tuple[Sequence, int], ...] = ()
    scored: tuple[tuple[Sequence, int, int], ...] = ()


class _Chunks(NamedTuple):
    """Chunks of one rank, or one chunk of which more is asked. Arrays as in StepPlan."""

    data_rank: int
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    token_ids: np.ndarray
    samples: np.ndarray
    demand: ChunkDemand | None = None


class PlanBuilder:
    """Grows a plan from running sequences, all at once, and from chunks of prompts, one by one."""

    def __init__(self, step_id: int, table: RowTable) -> None:
        self._step_id, self._table = step_id, table
        self._chunks: list[_Chunks] = []
        self._page_changes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._new_rows: list[Sequence] = []
        self._completed: list[tuple[Sequence, int]] = []
        self._has_demands = False

    def add_singles(self, data_rank: int, rows: np.ndarray, *, starts: np.ndarray) -> None:
        """Feed each of `rows` the token it sampled last, at position `starts`, and sample the next."""
        constants = self._table.singles[:, : len(rows)]
        lengths, token_ids = constants
        self._chunks.append(_Chunks(data_rank, rows, starts, lengths, token_ids, self._table.all_true[: len(rows)]))

    def add_chunk(self, sequence: Sequence, length: int, *, samples: bool, completes: bool) -> None:
        """Compute the next `length` known tokens of `sequence`, and sample after them where `samples`.

        `completes`: these are the last of its known tokens.
        """
        start = sequence.num_computed
        chunk = (np.array([value]) for value in (sequence.row, start, length))
        token_ids = sequence.token_ids[start : start + length].copy()
        demand = chunk_demand(sequence, start, stop=start + length)
        self._has_demands |= demand is not None
        self._chunks.append(_Chunks(sequence.data_rank, *chunk, token_ids, np.array([samples]), demand))
        if completes:
            self._completed.append((sequence, int(self._table.generations[sequence.row])))

    def add_row(self, sequence: Sequence) -> None:
        """Add the sampling parameters and pages of a row's new owner."""
        self._new_rows.append(sequence)
        self.add_pages(sequence, first=0)

    def add_pages(self, sequence: Sequence, *, first: int) -> None:
        """Add the row's pages from index `first` on."""
        pages = sequence.pages[first:]
        if len(pages):
            rows = np.full(len(pages), sequence.row)
            self._page_changes.append((rows, np.arange(first, first + len(pages)), pages.copy()))

    def add_page_each(self, rows: np.ndarray, indices: np.ndarray, *, page_ids: np.ndarray) -> None:
        """Add one new page of each row."""
        self._page_changes.append((rows, indices, page_ids))

    def build(self, *, captures_all: bool) -> Schedule:
        """Freeze the plan; it wants routing where a sequence of it does, or where `captures_all`."""
        rows, starts, lengths, token_ids, samples = self._joined()
        sampling_rows = rows if np.count_nonzero(samples) == len(rows) else rows[samples]
        table, work = self._table, NO_BLOCK_WORK
        scored: tuple[tuple[Sequence, int, int], ...] = ()
        if self._has_demands:
            by_rank = self._by_rank()
            work = block_work_of([(c.demand, len(c.rows), len(c.token_ids)) for c in by_rank])
            scored = tuple(self._scored(by_rank))
        wants_routing = captures_all or (table.num_wanting_routing > 0 and bool(table.wants_routing[rows].any()))
        plan = StepPlan(
            step_id=self._step_id,
            chunk_rows=rows,
            chunk_starts=starts,
            chunk_lengths=lengths,
            token_ids=token_ids,
            chunk_samples=samples,
            pages=self._pages(),
            sampling=row_sampling_of(self._new_rows),
            wants_routing=wants_routing and len(rows) > 0,
            adjustments=adjustments_of(self._new_rows),
            block_work=work,
            wants_top=table.num_wanting_top > 0 and bool(table.num_top[sampling_rows].any()),
            wants_score_top=any(sequence.num_top for sequence, _, _ in scored),
        )
        return Schedule(
            plan,
            sampling_rows,
            table.generations[sampling_rows],
            table.num_departures,
            completed=tuple(self._completed),
            scored=scored,
        )

    def _scored(self, by_rank: list[_Chunks]) -> Iterator[tuple[Sequence, int, int]]:
        for _, rows, *_, demand in by_rank:
            if demand is not None and len(demand.targets):
                sequence = self._table.sequences[rows[0]]
                assert sequence is not None, "a chunk belongs to a sequence"
                yield sequence, demand.scored_from, len(demand.targets)

    def _by_rank(self) -> list[_Chunks]:
        return sorted(self._chunks, key=lambda chunks: chunks.data_rank)

    def _joined(self) -> tuple[np.ndarray, ...]:
        if len(self._chunks) == 1:
            return self._chunks[0][1:6]
        empty = [np.zeros(0, np.intp)] * 3 + [np.zeros(0, np.int32), np.zeros(0, np.bool_)]
        parts = [empty, *(chunks[1:6] for chunks in self._by_rank())]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def _pages(self) -> PageTableChanges:
        if not self._page_changes:
            return NO_PAGE_CHANGES
        if len(self._page_changes) == 1:
            return PageTableChanges(*self._page_changes[0])
        return PageTableChanges(*(np.concatenate(column) for column in zip(*self._page_changes, strict=True)))


NO_IDS = np.zeros(0, np.int32)


def row_sampling_of(sequences: list[Sequence]) -> RowSampling:
    """Sampling parameters of sequences that have just taken their rows."""
    if not sequences:
        return NO_NEW_ROWS
    floats = [[getattr(s.request.sampling, name) for name in RowFloats._fields] for s in sequences]
    return RowSampling(
        np.asarray([sequence.row for sequence in sequences], np.int32),
        np.asarray(floats, np.float32),
        np.asarray([_integers_of(sequence) for sequence in sequences], np.uint32),
    )


def _integers_of(sequence: Sequence) -> RowIntegers:
    params = sequence.request.sampling
    return RowIntegers(
        top_k=params.top_k,
        seed=sequence.seed,
        choice=params.first_choice + sequence.choice_index,
        adjusts=_adjusts(params),
        num_top=sequence.num_top,
        first_end=_first_end(sequence),
    )


def adjustments_of(sequences: list[Sequence]) -> tuple[RowAdjustment, ...]:
    """What the logits of those are adjusted by whose requests ask for it: all known tokens count as seen."""
    return tuple(_adjustment(s) for s in sequences if _adjusts(s.request.sampling) or _first_end(s))


def _adjustment(sequence: Sequence) -> RowAdjustment:
    sampling, num_prompt = sequence.request.sampling, sequence.num_prompt_tokens
    counts = _penalizes(sampling)
    withheld = [(token_id, WITHHELD) for token_id in sorted(sequence.withheld_ids if _first_end(sequence) else ())]
    biases = [*sampling.logit_bias, *withheld]
    return RowAdjustment(
        sequence.row,
        prompt_ids=sequence.token_ids[:num_prompt].copy() if counts else NO_IDS,
        output_ids=sequence.token_ids[num_prompt : sequence.num_tokens].copy() if counts else NO_IDS,
        bias_ids=np.asarray([token_id for token_id, _ in biases], np.int32),
        bias_values=np.asarray([value for _, value in biases], np.float32),
    )


def _first_end(sequence: Sequence) -> int:
    """First position where withheld ids may stand; 0 where nothing is withheld any more."""
    position = sequence.num_prompt_tokens + sequence.request.sampling.min_new_tokens
    return position if sequence.withheld_ids and sequence.num_tokens < position else 0


def _adjusts(params: SamplingParams) -> bool:
    return _penalizes(params) or len(params.logit_bias) > 0


def _penalizes(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
