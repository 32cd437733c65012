"""Routing capture: moves routing rows from step results into the store, and from there to sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from rayserve_moe.engine.extension import ReplacedHosts, Reset, StepExtension
from rayserve_moe.replay.index_rows import IndexStore
from rayserve_moe.replay.routing_store import GateStore, PartStore, RoutingStore
from rayserve_moe.requests.columns import Ragged, Values
from rayserve_moe.requests.records import GATES, INDEX, GenerationRequest, ModelCard, RoutedExperts
from rayserve_moe.requests.row_parts import unknown_entries
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.scheduler import Preemption
from rayserve_moe.scheduling.sequence import KnownRows, Sequence
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult
from rayserve_moe.scheduling.verify_rows import tokens_that_count

SOURCES = ("computed", "cached", "recomputed", "transferred")
NO_VERSION = -1
Places = tuple[np.ndarray, np.ndarray]
"""Slots of the store, and the stamps of their rows."""


class PageRows(NamedTuple):
    """Rows of the tokens of a page, while it is in host memory."""

    rows: np.ndarray
    versions: np.ndarray
    parts: dict[str, np.ndarray]


class RoutingCapture(StepExtension):
    """Owner of the routing store. Rows of a step arrive with its result, possibly after the next step is submitted.

    Rows survive preemption: they stay with the sequence. Rows of sampled tokens belong to log-probs that are published,
    so they replace recomputed rows. Rows of the prompt are only used until it is recomputed. Every row stores the
    weight version that it was computed under.
    """

    def __init__(
        self,
        card: ModelCard,
        table: RowTable,
        *,
        num_pages: int,
        num_data_ranks: int = 1,
    ) -> None:
        self._layout, self._table = card.routing, table
        self._page_size = page_size = table.page_size
        self._slots_per_rank = num_pages * page_size
        num_slots = num_data_ranks * self._slots_per_rank
        stores: dict[str, PartStore] = {}
        if card.index is not None:
            stores[INDEX] = IndexStore(max_bytes=card.index.max_bytes)
        if card.gates is not None:
            stores[GATES] = GateStore(card.routing, num_slots=num_slots)
        self._store = RoutingStore(card.routing, num_slots=num_slots, parts=stores)
        self._num_data_ranks = num_data_ranks
        self._versions = [card.weight_version]
        self._submitted: dict[int, Callable[..., None]] = {}
        """Function that stores the rows of a step, by step id."""
        self._preempted: list[Preemption] = []
        """Preemptions whose rows are still in flight."""
        self._has_kept = False

    @property
    def weight_version(self) -> str:
        """Return the weight version of steps that are submitted from now on."""
        return self._versions[-1]

    def submitted(self, schedule: Schedule) -> None:
        """Record the locations of a step's rows, before its table rows can change owners."""
        plan, table = schedule.plan, self._table
        if not plan.wants_routing:
            return
        chunks = plan.chunks
        rows, positions = chunks.rows, chunks.starts
        if plan.num_tokens != plan.num_chunks or chunks.num_forks:
            first_token = np.cumsum(chunks.lengths) - chunks.lengths
            rows = np.repeat(rows, chunks.lengths)
            positions = np.arange(plan.num_tokens) + np.repeat(positions - first_token, chunks.lengths)
        places = self._places_in(table, rows, positions)
        kept = self._kept_rows(plan, table) if self._has_kept else []
        forks = self._forked_places(plan, table) if chunks.num_forks else None
        under = len(self._versions) - 1
        self._submitted[plan.step_id] = partial(self._store_rows, places=places, version=under, kept=kept, forks=forks)

    def returned(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None) -> None:
        """Store the rows of a step's result. Rows that never arrive stay missing."""
        store_rows = self._submitted.pop(result.step_id, None)
        if store_rows is not None and result.routing is not None:
            belongs = slice(None) if counts is None else tokens_that_count(schedule, counts)
            store_rows(result, belongs=belongs)
        for preemption in self._preempted:
            self._retain(preemption)
        self._preempted.clear()

    def preempted(self, preemption: Preemption) -> None:
        """Keep the rows of a preempted sequence, and add rows of the step in flight when they arrive."""
        self._retain(preemption)
        if self._submitted:
            self._preempted.append(preemption)

    def released(self, sequence: Sequence) -> None:
        """Collect the rows of an ended sequence if its client wants them."""
        if sequence.request.wants_rows:
            sequence.routing.final = self._published(sequence)

    def reset(self, cause: Reset) -> None:
        """Discard pending rows of lost hosts, or set the weight version of later steps."""
        if isinstance(cause, ReplacedHosts):
            self._submitted.clear()
            self._preempted.clear()
        elif cause.weight_version != self._versions[-1]:
            self._versions.append(cause.weight_version)

    def of_page(self, data_rank: int, page: int, *, generation: int) -> PageRows | None:
        """Return a copy of the rows of all tokens of a page, or None if some are not known."""
        slots, stamps = self._page_places(data_rank, page, generation)
        rows, is_known = self._store.read(slots, stamps)
        if not is_known.all():
            return None
        return PageRows(rows, self._store.versions(slots), self._store.parts(slots, is_known))

    def put(self, data_rank: int, page: int, *, generation: int, rows: PageRows) -> None:
        """Store rows for another allocation of a page."""
        slots, stamps = self._page_places(data_rank, page, generation)
        self._store.write(slots, stamps, rows=rows.rows, versions=rows.versions, parts=rows.parts)

    def for_push(self, rows: PageRows) -> PageRows | None:
        """Return rows without their version, for another server; None if they are not of the current weights."""
        is_current = (rows.versions == len(self._versions) - 1).all()
        return rows._replace(versions=np.zeros(0, np.int32)) if is_current else None

    def from_push(self, rows: PageRows) -> PageRows:
        """Return rows of another server, with the current version."""
        return rows._replace(versions=np.full(len(rows.rows), len(self._versions) - 1, np.int32))

    def streamed(self, sequence: Sequence) -> RoutedExperts | None:
        """Return the rows of a running sequence that its client does not have yet; None if they are not streamed."""
        return self._published(sequence) if _streams_routing(sequence.request) else None

    def gather(self, sequence: Sequence, *, start: int = 0) -> RoutedExperts:
        """Return the rows from position `start` on of a sequence that runs, waits, or has ended.

        Rows are for positions up to num_tokens - 2, or for all prompt positions if nothing was generated. Rows that
        were never computed are missing.
        """
        known = self._known_rows(sequence, sequence, start, origins=sequence.cache.origins)
        return RoutedExperts(
            rows=known.rows,
            start=start,
            missing=tuple((a, b) for a, b, is_known in _runs(known.is_known, start) if not is_known),
            source=tuple((a, b, SOURCES[kind]) for a, b, kind in _runs(known.kinds, start)),
            weight_version=tuple(
                (a, b, sequence.request.version_label(self._versions[version]))
                for a, b, version in _runs(np.where(known.is_known, known.versions, NO_VERSION), start)
                if version != NO_VERSION
            ),
            parts=known.parts,
        )

    def _published(self, sequence: Sequence) -> RoutedExperts:
        """Return the rows that the client does not have yet; streamed rows count as published from now on."""
        published = sequence.published
        routing = self.gather(sequence, start=published.num_routing_rows)
        if _streams_routing(sequence.request):
            published.num_routing_rows += len(routing.rows)
        return routing

    def _retain(self, preemption: Preemption) -> None:
        """Keep the rows of a preempted sequence that its client wants and does not have, and all rows of outputs.

        The row of the last token is excluded, since no output followed it.
        """
        sequence = preemption.sequence
        if sequence.request.wants_rows:
            start = min(sequence.published.num_routing_rows, sequence.num_prompt_tokens)
            sequence.routing.kept = self._known_rows(sequence, preemption, start, origins=preemption.origins)
            self._has_kept = True

    def _store_rows(
        self,
        result: StepResult,
        *,
        belongs: np.ndarray | slice,
        places: Places,
        version: int,
        kept: list[tuple[Places, np.ndarray, np.ndarray, dict[str, np.ndarray]]],
        forks: tuple[Places, Places] | None,
    ) -> None:
        """Store the rows of a step that ran under `version`, then kept rows, which replace them, then rows of forks.

        Forks copy the last page of their prompts.
        """
        assert result.routing is not None, "rows of a step without any"
        slots, stamps = (each[belongs] for each in places)
        parts = {name: _entries(values[belongs]) for name, values in result.row_parts.items()}
        self._store.write(slots, stamps, rows=result.routing[belongs], versions=version, parts=parts)
        for (kept_slots, kept_stamps), kept_rows, versions, kept_parts in kept:
            self._store.write(kept_slots, kept_stamps, rows=kept_rows, versions=versions, parts=kept_parts)
        if forks is not None:
            (slots, stamps), own = forks
            rows, is_known = self._store.read(slots, stamps)
            own_slots, own_stamps = (places[is_known] for places in own)
            versions = self._store.versions(slots)[is_known]
            copied = self._store.parts(slots[is_known], is_known[is_known])
            self._store.write(own_slots, own_stamps, rows=rows[is_known], versions=versions, parts=copied)

    def _forked_places(self, plan: StepPlan, table: RowTable) -> tuple[Places, Places]:
        """Return the slots and stamps of the rows that forks copy, and of their copies."""
        chunks = plan.chunks
        forks = np.flatnonzero(chunks.lengths == 0)
        ends = chunks.starts[forks]
        counts = ends % self._page_size
        positions = np.arange(counts.sum()) + np.repeat(ends - np.cumsum(counts), counts)
        rows = (np.repeat(chunks.rows[places], counts) for places in (chunks.sources[forks], forks))
        source, own = (self._places_in(table, each, positions) for each in rows)
        return source, own

    def _page_places(self, data_rank: int, page: int, generation: int) -> Places:
        """Return the slots and stamps of the tokens of a page."""
        first = data_rank * self._slots_per_rank + page * self._page_size
        return np.arange(first, first + self._page_size), np.full(self._page_size, generation)

    def _places_in(self, table: RowTable, rows: np.ndarray, positions: np.ndarray) -> Places:
        """Return slots and stamps of positions of table rows of all data ranks."""
        slots, stamps = table.places(rows, positions)
        if self._num_data_ranks > 1:
            slots = slots + rows // (len(table.sequences) // self._num_data_ranks) * self._slots_per_rank
        return slots, stamps

    def _known_rows(
        self, sequence: Sequence, held: Sequence | Preemption, start: int, *, origins: tuple[tuple[int, int, str], ...]
    ) -> KnownRows:
        """Return the rows from position `start` on: rows of the pages that are or were held, and rows kept before."""
        num_fed = sequence.num_tokens - 1
        count = max(0, (num_fed if sequence.num_outputs else max(num_fed, held.num_computed)) - start)
        num_computed = max(0, min(held.num_computed - start, count))
        known = KnownRows(
            start,
            np.zeros(count, np.bool_),
            np.zeros((count, *self._layout.row_shape), self._layout.dtype),
            np.zeros(count, np.int32),
            _kinds(origins, start, count),
            {},
        )
        slots, stamps = self._places(held, start, start + num_computed)
        _, known.is_known[:num_computed] = self._store.read(slots, stamps, out=known.rows[:num_computed])
        known.versions[:num_computed] = self._store.versions(slots)
        for name, values in self._store.parts(slots, known.is_known[:num_computed]).items():
            known.parts[name] = np.concatenate([values, unknown_entries(values, count - num_computed)])
        if (kept := sequence.routing.kept) is not None:
            _add_kept(known, kept, first_output=sequence.num_prompt_tokens)
        return known

    def _places(self, held: Sequence | Preemption, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return slots and stamps of positions `[first, last)`, from pages that are or were held."""
        index, offset = np.divmod(np.arange(first, last), self._page_size)
        first_slot = held.data_rank * self._slots_per_rank
        return first_slot + held.pages[index].astype(np.int64) * self._page_size + offset, held.page_generations[index]

    def _kept_rows(
        self, plan: StepPlan, table: RowTable
    ) -> list[tuple[Places, np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
        """Return places, rows, versions and parts of sampled tokens with kept rows that this step recomputes."""
        kept, chunks = [], plan.chunks
        again = (chunks.lengths > 1) | np.isin(chunks.rows, plan.sampling.rows)
        for chunk in np.flatnonzero(again).tolist():
            sequence = table.sequences[chunks.rows[chunk]]
            if sequence is None or (known := sequence.routing.kept) is None:
                continue
            start, length = int(chunks.starts[chunk]), int(chunks.lengths[chunk])
            first, last = max(start, sequence.num_prompt_tokens), min(start + length, known.end)
            if last > first:
                part = np.arange(first, last)[known.is_known[first - known.start : last - known.start]] - known.start
                slots, stamps = self._places(sequence, first, last)
                places = part + known.start - first
                parts = {name: values[part] for name, values in known.parts.items()}
                kept.append(((slots[places], stamps[places]), known.rows[part], known.versions[part], parts))
        return kept


def _streams_routing(request: GenerationRequest) -> bool:
    return request.wants_rows and request.stream_routed_experts


def _add_kept(known: KnownRows, kept: KnownRows, *, first_output: int) -> None:
    """Add kept rows: all rows of outputs, and those rows of the prompt that are not known otherwise."""
    first, last = max(known.start, kept.start), min(known.end, kept.end)
    if first < last:
        ours, theirs = (slice(first - rows.start, last - rows.start) for rows in (known, kept))
        is_output = np.arange(first, last) >= first_output
        taken = kept.is_known[theirs] & (is_output | ~known.is_known[ours])
        for values, kept_values in zip(_arrays(known), _arrays(kept), strict=True):
            values[ours][taken] = kept_values[theirs][taken]


def _arrays(known: KnownRows) -> list[np.ndarray]:
    """Return the arrays with an entry per row."""
    return [known.is_known, known.rows, known.versions, known.kinds, *known.parts.values()]


def _entries(values: Values) -> np.ndarray:
    """Return the entries of a part of a step's rows; packed index rows as bytes."""
    if not isinstance(values, Ragged):
        return values
    entries = np.empty(len(values), object)
    entries[:] = [row.tobytes() for row in values.entries()]
    return entries


def _runs(values: np.ndarray, start: int) -> list[tuple[int, int, int]]:
    """Return ranges `(from, to, value)` of equal values of an array over positions from `start` on."""
    borders = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(start + a, start + b, int(values[a])) for a, b in itertools.pairwise(borders) if a < b]


def _kinds(origins: tuple[tuple[int, int, str], ...], start: int, count: int) -> np.ndarray:
    """Return the source of each row from position `start` on, as an index of SOURCES, int8 [count]."""
    kinds = np.zeros(count, np.int8)
    for first, last, kind in origins:
        kinds[max(0, first - start) : max(0, last - start)] = SOURCES.index(kind)
    return kinds
