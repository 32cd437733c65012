"""Following the routing of running sequences from step results into the store and out again."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np

from rayserve_moe.replay.routing_store import RoutingStore
from rayserve_moe.requests import RoutedExperts, RoutingLayout
from rayserve_moe.scheduling.scheduler import Preemption, Schedule
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import RoutingRows


@dataclass(frozen=True)
class _Pending:
    """Where the rows of a submitted step belong, and sampled rows that outrank what it recomputes."""

    step_id: int
    slots: np.ndarray
    stamps: np.ndarray
    kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]]


class RoutingCapture:
    """Owns the store. Rows of a step arrive one step late; until then `is_pending`.

    Rows of sampled tokens survive preemption: they stay with the sequence, next to their log-probs, and replace what
    the recomputation finds.
    """

    def __init__(self, layout: RoutingLayout, *, num_pages: int, page_size: int, weight_version: str) -> None:
        self._layout = layout
        self._store = RoutingStore(layout, num_slots=num_pages * page_size)
        self._page_size = page_size
        self._weight_version = weight_version
        self._pending: _Pending | None = None

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def submit(self, schedule: Schedule) -> None:
        """Note where the rows of a step belong, once the rows of the step before are absorbed."""
        if not schedule.plan.wants_routing:
            return
        assert self._pending is None, "rows of the last step were not absorbed"
        places, kept = [], []
        spans = zip(schedule.sequences, schedule.plan.chunk_starts, schedule.plan.chunk_lengths, strict=True)
        for sequence, start, length in spans:
            first, last = int(start), int(start) + int(length)
            places.append(self._places(sequence.pages, sequence.page_generations, first, last))
            kept += self._kept_rows(sequence, first, last)
        slots, stamps = (np.concatenate(parts) for parts in zip(*places, strict=True))
        self._pending = _Pending(schedule.plan.step_id, slots, stamps, kept)

    def absorb(self, routing: RoutingRows | None) -> None:
        """Store rows that arrived with a later result. Rows that never come stay missing."""
        pending, self._pending = self._pending, None
        if pending is None or routing is None or routing.step_id != pending.step_id:
            return
        self._store.write(pending.slots, pending.stamps, rows=routing.rows)
        for slots, stamps, rows in pending.kept:
            self._store.write(slots, stamps, rows=rows)

    def retain(self, preemption: Preemption) -> None:
        """Keep the rows of sampled tokens with a sequence that lost its pages."""
        sequence = preemption.sequence
        if not sequence.request.return_routed_experts:
            return
        first, last = sequence.num_prompt_tokens, preemption.num_computed
        sequence.num_recomputed = max(sequence.num_recomputed, min(first, last))
        if last > first:
            places = self._places(preemption.pages, preemption.page_generations, first, last)
            rows, present = self._store.read(*places)
            num_kept = len(rows) if present.all() else int(np.argmin(present))
            if sequence.sampled_rows is None or num_kept > len(sequence.sampled_rows):
                sequence.sampled_rows = rows[:num_kept]

    def gather(self, sequence: Sequence) -> RoutedExperts:
        """Collect the rows of an ended sequence that still holds its pages.

        Rows are for positions 0 .. num_tokens - 2 (all prompt positions where nothing was generated). What was not
        computed, or lost in a preemption from which the sequence never came back, is missing.
        """
        count = max(sequence.num_computed, sequence.num_tokens - 1)
        rows = np.zeros((count, *self._layout.row_shape), self._layout.dtype)
        present = np.zeros(count, np.bool_)
        computed = slice(0, sequence.num_computed)
        places = self._places(sequence.pages, sequence.page_generations, 0, sequence.num_computed)
        rows[computed], present[computed] = self._store.read(*places)
        if sequence.sampled_rows is not None:
            first = sequence.num_prompt_tokens
            kept = slice(first, first + len(sequence.sampled_rows))
            rows[kept], present[kept] = sequence.sampled_rows, True
        return RoutedExperts(
            rows=rows,
            missing=_ranges_where(~present),
            source=_sources(count, sequence.num_cached, sequence.num_recomputed),
            weight_version=((0, count, self._weight_version),) if count else (),
        )

    def _places(
        self, pages: Listed[int], generations: Listed[int], first: int, last: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slots and stamps of positions `[first, last)`."""
        index, offset = np.divmod(np.arange(first, last), self._page_size)
        return np.asarray(pages, np.int64)[index] * self._page_size + offset, np.asarray(generations, np.int64)[index]

    def _kept_rows(self, sequence: Sequence, first: int, last: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Places and rows of the sampled tokens among positions `[first, last)` whose rows were kept, if any."""
        prompt, rows = sequence.num_prompt_tokens, sequence.sampled_rows
        if rows is None:
            return []
        first, last = max(first, prompt), min(last, prompt + len(rows))
        if last <= first:
            return []
        places = self._places(sequence.pages, sequence.page_generations, first, last)
        return [(*places, rows[first - prompt : last - prompt])]


def _ranges_where(flags: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Ranges `[from, to)` in which a bool array is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _sources(count: int, num_cached: int, num_recomputed: int) -> tuple[tuple[int, int, str], ...]:
    """How each row came about: taken over with shared pages, computed anew after preemption, or computed once."""
    borders = [(0, num_recomputed, "recomputed"), (num_recomputed, num_cached, "cached")]
    borders.append((max(num_cached, num_recomputed), count, "computed"))
    return tuple((a, min(b, count), kind) for a, b, kind in borders if a < min(b, count))
