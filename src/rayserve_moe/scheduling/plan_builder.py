"""Collecting one step's chunks and changes, then freezing them into a StepPlan."""

from __future__ import annotations

import numpy as np

from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import PageTableChanges, RowSampling, StepPlan


class PlanBuilder:
    """Grows a plan chunk by chunk; `sequences[c]` is the owner of chunk c."""

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id
        self.sequences: list[Sequence] = []
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._page_changes: list[tuple[int, int, int]] = []
        self._new_rows: list[Sequence] = []

    def add_chunk(self, sequence: Sequence, length: int) -> None:
        """Compute the next `length` tokens of `sequence` in this step."""
        self.sequences.append(sequence)
        self._starts.append(sequence.num_computed)
        self._lengths.append(length)

    def add_row(self, sequence: Sequence) -> None:
        """Tell the hosts how the new owner of a row samples, and which pages it brings."""
        self._new_rows.append(sequence)
        self.add_pages(sequence, first=0)

    def add_pages(self, sequence: Sequence, *, first: int) -> None:
        """Tell the hosts the row's pages from index `first` on."""
        self._page_changes += [(sequence.row, i, sequence.pages[i]) for i in range(first, len(sequence.pages))]

    def build(self) -> StepPlan:
        """Freeze the plan."""
        spans = list(zip(self.sequences, self._starts, self._lengths, strict=True))
        tokens = [s.tokens(start, start + length) for s, start, length in spans]
        return StepPlan(
            step_id=self._step_id,
            chunk_rows=np.asarray([s.row for s in self.sequences], np.int32),
            chunk_starts=np.asarray(self._starts, np.int32),
            chunk_lengths=np.asarray(self._lengths, np.int32),
            token_ids=np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
            chunk_samples=np.asarray([_samples(*span) for span in spans], np.bool_),
            pages=PageTableChanges(*np.asarray(self._page_changes, np.int32).reshape(-1, 3).T),
            sampling=self._row_sampling(),
            wants_routing=any(s.request.return_routed_experts for s in self.sequences),
        )

    def _row_sampling(self) -> RowSampling:
        params = [s.request.sampling for s in self._new_rows]
        floats = [(p.temperature, p.top_p, p.min_p) for p in params]
        integers = [(p.top_k, s.seed, s.choice_index) for p, s in zip(params, self._new_rows, strict=True)]
        return RowSampling(
            np.asarray([s.row for s in self._new_rows], np.int32),
            np.asarray(floats, np.float32).reshape(-1, 3),
            np.asarray(integers, np.uint32).reshape(-1, 3),
        )


def _samples(sequence: Sequence, start: int, length: int) -> bool:
    return start + length == sequence.num_tokens and sequence.request.sampling.max_new_tokens > 0
