"""Collecting one step's chunks and changes, then freezing them into a StepPlan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import (
    NO_NEW_ROWS,
    NO_PAGE_CHANGES,
    PageTableChanges,
    RowSampling,
    StepPlan,
)


@dataclass(frozen=True)
class Schedule:
    """A plan, and what its result is taken over by.

    `sampling_rows` are the rows of the chunks that sample, `sampling_epochs` whose they were, `num_departures` how many
    sequences had ever left a row by then. `completed` are sequences
    whose last known token is computed by a longer chunk of this step, with their epochs.
    """

    plan: StepPlan
    sampling_rows: np.ndarray
    sampling_epochs: np.ndarray
    num_departures: int
    completed: tuple[tuple[Sequence, int], ...] = ()


class _Chunks(NamedTuple):
    """Chunks of one rank. Arrays as in StepPlan."""

    data_rank: int
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    token_ids: np.ndarray
    samples: np.ndarray


class PlanBuilder:
    """Grows a plan from running sequences, all at once, and from chunks of prompts, one by one."""

    def __init__(self, step_id: int, table: RowTable) -> None:
        self._step_id, self._table = step_id, table
        self._chunks: list[_Chunks] = []
        self._page_changes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._new_rows: list[Sequence] = []
        self._completed: list[tuple[Sequence, int]] = []

    def add_singles(self, data_rank: int, rows: np.ndarray, *, starts: np.ndarray) -> None:
        """Feed each of `rows` the token it sampled last, at position `starts`, and sample the next."""
        constants = self._table.singles[:, : len(rows)]
        self._chunks.append(_Chunks(data_rank, rows, starts, *constants, self._table.all_true[: len(rows)]))

    def add_chunk(self, sequence: Sequence, length: int, *, samples: bool, completes: bool) -> None:
        """Compute the next `length` known tokens of `sequence`, and sample after them where `samples`.

        `completes`: these are the last of its known tokens.
        """
        start = sequence.num_computed
        chunk = (np.array([value]) for value in (sequence.row, start, length))
        token_ids = sequence.tokens(start, start + length).copy()
        self._chunks.append(_Chunks(sequence.data_rank, *chunk, token_ids, np.array([samples])))
        if completes:
            self._completed.append((sequence, int(self._table.epochs[sequence.row])))

    def add_row(self, sequence: Sequence) -> None:
        """Tell the hosts how the new owner of a row samples, and which pages it brings."""
        self._new_rows.append(sequence)
        self.add_pages(sequence, first=0)

    def add_pages(self, sequence: Sequence, *, first: int) -> None:
        """Tell the hosts the row's pages from index `first` on."""
        pages = sequence.pages[first:]
        if len(pages):
            rows = np.full(len(pages), sequence.row)
            self._page_changes.append((rows, np.arange(first, first + len(pages)), pages.copy()))

    def add_page_each(self, rows: np.ndarray, indices: np.ndarray, *, page_ids: np.ndarray) -> None:
        """Tell the hosts one new page of each row."""
        self._page_changes.append((rows, indices, page_ids))

    def build(self, *, captures_all: bool) -> Schedule:
        """Freeze the plan; it wants routing where a sequence of it does, or where `captures_all`."""
        rows, starts, lengths, token_ids, samples = self._joined()
        sampling_rows = rows if np.count_nonzero(samples) == len(rows) else rows[samples]
        table = self._table
        wants_routing = captures_all or (table.num_wanting_routing > 0 and bool(table.wants_routing[rows].any()))
        plan = StepPlan(
            step_id=self._step_id,
            chunk_rows=rows,
            chunk_starts=starts,
            chunk_lengths=lengths,
            token_ids=token_ids,
            chunk_samples=samples,
            pages=self._pages(),
            sampling=self._row_sampling(),
            wants_routing=wants_routing and len(rows) > 0,
        )
        return Schedule(plan, sampling_rows, table.epochs[sampling_rows], table.num_departures, tuple(self._completed))

    def _joined(self) -> tuple[np.ndarray, ...]:
        if len(self._chunks) == 1:
            return self._chunks[0][1:]
        by_rank = sorted(self._chunks, key=lambda chunks: chunks.data_rank)
        empty = [np.zeros(0, np.intp)] * 3 + [np.zeros(0, np.int32), np.zeros(0, np.bool_)]
        parts = [empty, *(chunks[1:] for chunks in by_rank)]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def _pages(self) -> PageTableChanges:
        if not self._page_changes:
            return NO_PAGE_CHANGES
        if len(self._page_changes) == 1:
            return PageTableChanges(*self._page_changes[0])
        return PageTableChanges(*(np.concatenate(column) for column in zip(*self._page_changes, strict=True)))

    def _row_sampling(self) -> RowSampling:
        if not self._new_rows:
            return NO_NEW_ROWS
        params = [s.request.sampling for s in self._new_rows]
        floats = [(p.temperature, p.top_p, p.min_p) for p in params]
        integers = [(p.top_k, s.seed, s.choice_index) for p, s in zip(params, self._new_rows, strict=True)]
        return RowSampling(
            np.asarray([s.row for s in self._new_rows], np.int32),
            np.asarray(floats, np.float32).reshape(-1, 3),
            np.asarray(integers, np.uint32).reshape(-1, 3),
        )
