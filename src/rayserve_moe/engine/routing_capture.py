"""Following the routing of running sequences from step results into the store and out again."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np

from rayserve_moe.replay.routing_store import RoutingStore
from rayserve_moe.requests import RoutedExperts, RoutingLayout
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.scheduler import Preemption
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import RoutingRows, StepPlan

SOURCES = ("computed", "cached", "recomputed")


@dataclass(frozen=True)
class _Pending:
    """Where the rows of a submitted step belong, and sampled rows that outrank what it recomputes."""

    step_id: int
    slots: np.ndarray
    stamps: np.ndarray
    kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]]


class RoutingCapture:
    """Owns the store. The rows of a step are due with its result, which may come after the next step is submitted.

    Rows of sampled tokens survive preemption: they stay with the sequence, next to their log-probs, and replace what
    the recomputation finds.
    """

    def __init__(
        self, layout: RoutingLayout, *, num_pages: int, page_size: int, num_data_ranks: int = 1, weight_version: str
    ) -> None:
        self._layout = layout
        self._page_size = page_size
        self._slots_per_rank = num_pages * page_size
        self._store = RoutingStore(layout, num_slots=num_data_ranks * self._slots_per_rank)
        self._num_data_ranks = num_data_ranks
        self._weight_version = weight_version
        self._submitted: deque[_Pending] = deque()
        self._has_kept = False

    def submit(self, plan: StepPlan, table: RowTable) -> None:
        """Note where the rows of a step belong, before its rows can change hands."""
        if not plan.wants_routing:
            return
        rows, positions = plan.chunk_rows, plan.chunk_starts
        if plan.num_tokens != plan.num_chunks:
            first_token = np.cumsum(plan.chunk_lengths) - plan.chunk_lengths
            rows = np.repeat(rows, plan.chunk_lengths)
            positions = np.arange(plan.num_tokens) + np.repeat(positions - first_token, plan.chunk_lengths)
        slots, stamps = table.places(rows, positions)
        if self._num_data_ranks > 1:
            slots = slots + rows // (len(table.sequences) // self._num_data_ranks) * self._slots_per_rank
        kept = self._kept_rows(plan, table) if self._has_kept else []
        self._submitted.append(_Pending(plan.step_id, slots, stamps, kept))

    def absorb(self, routing: RoutingRows | None) -> None:
        """Store the rows that came with the oldest result outstanding. Rows that never come stay missing."""
        if routing is None:
            return
        while self._submitted:
            pending = self._submitted.popleft()
            if pending.step_id == routing.step_id:
                self._store.write(pending.slots, pending.stamps, rows=routing.rows)
                for slots, stamps, rows in pending.kept:
                    self._store.write(slots, stamps, rows=rows)
                return

    def retain(self, preemption: Preemption) -> None:
        """Keep the rows of sampled tokens with a sequence that lost its pages."""
        sequence = preemption.sequence
        if not sequence.request.return_routed_experts:
            return
        first, last = sequence.num_prompt_tokens, preemption.num_computed
        if last > first:
            pages = (preemption.page_ids, preemption.page_generations)
            places = self._places(sequence.data_rank, pages, first, last)
            rows, present = self._store.read(*places)
            num_kept = len(rows) if present.all() else int(np.argmin(present))
            if sequence.sampled_rows is None or num_kept > len(sequence.sampled_rows):
                sequence.sampled_rows = rows[:num_kept]
                self._has_kept = True

    def gather(self, sequence: Sequence) -> RoutedExperts:
        """Collect the rows of an ended sequence that still holds its pages.

        Rows are for positions 0 .. num_tokens - 2 (all prompt positions where nothing was generated). What was not
        computed, or lost in a preemption from which the sequence never came back, is missing.
        """
        num_fed = sequence.num_tokens - 1
        count = num_fed if sequence.num_outputs else max(num_fed, sequence.num_computed)
        rows = np.zeros((count, *self._layout.row_shape), self._layout.dtype)
        present = np.zeros(count, np.bool_)
        num_computed = min(sequence.num_computed, count)
        places = self._places(sequence.data_rank, (sequence.pages, sequence.page_generations), 0, num_computed)
        rows[:num_computed], present[:num_computed] = self._store.read(*places)
        if sequence.sampled_rows is not None:
            first = sequence.num_prompt_tokens
            kept = slice(first, first + len(sequence.sampled_rows))
            rows[kept], present[kept] = sequence.sampled_rows, True
        return RoutedExperts(
            rows=rows,
            missing=_ranges_where(~present),
            source=_sources(count, sequence.origins),
            weight_version=((0, count, self._weight_version),) if count else (),
        )

    def _places(
        self, data_rank: int, pages: tuple[np.ndarray, np.ndarray], first: int, last: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slots and stamps of positions `[first, last)`, from page ids and their generations."""
        page_ids, generations = pages
        index, offset = np.divmod(np.arange(first, last), self._page_size)
        first_slot = data_rank * self._slots_per_rank
        return first_slot + page_ids[index].astype(np.int64) * self._page_size + offset, generations[index]

    def _kept_rows(self, plan: StepPlan, table: RowTable) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Places and rows of sampled tokens that this step recomputes although their rows were kept."""
        kept = []
        again = (plan.chunk_lengths > 1) | np.isin(plan.chunk_rows, plan.sampling.rows)
        for chunk in np.flatnonzero(again).tolist():
            sequence = table.sequences[plan.chunk_rows[chunk]]
            assert sequence is not None, "a chunk belongs to a sequence"
            if sequence.sampled_rows is None:
                continue
            prompt, start = sequence.num_prompt_tokens, int(plan.chunk_starts[chunk])
            stop = start + int(plan.chunk_lengths[chunk])
            first, last = max(start, prompt), min(stop, prompt + len(sequence.sampled_rows))
            if last > first:
                pages = (sequence.pages, sequence.page_generations)
                places = self._places(sequence.data_rank, pages, first, last)
                kept.append((*places, sequence.sampled_rows[first - prompt : last - prompt]))
        return kept


def _ranges_where(flags: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Ranges `[from, to)` in which a bool array is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _sources(count: int, origins: tuple[tuple[int, int, str], ...]) -> tuple[tuple[int, int, str], ...]:
    """How each row came about: found in the cache, computed anew after a preemption, or computed once."""
    kinds = np.zeros(count, np.int8)
    for first, last, kind in origins:
        kinds[first:last] = SOURCES.index(kind)
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), count]
    return tuple((a, b, SOURCES[kinds[a]]) for a, b in itertools.pairwise(borders) if a < b)
