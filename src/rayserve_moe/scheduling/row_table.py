"""Table of the sequences in all rows of device state, as arrays over rows."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from rayserve_moe.scheduling.sequence import (
    LIMIT,
    NO_ROW,
    NUM_COMPUTED,
    NUM_COUNTERS,
    NUM_PAGES,
    NUM_TOKENS,
    TARGET,
    RowArrays,
    Sequence,
)
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED

NO_TOKEN = -1


@dataclass(slots=True)
class RowWants:
    """Requirements of the sequence in each row, and the number of rows in use with each requirement."""

    stop_ids: np.ndarray
    """Ids that end the sequence, int32 [rows, N], padded with NO_TOKEN."""
    is_incremental: np.ndarray
    """True if the client wants updates, bool [rows]."""
    routing: np.ndarray
    """True if the client wants routing rows, bool [rows]."""
    columns: np.ndarray
    """Bit i is set if the client wants column i of `OUTPUT_COLUMNS`, int64 [rows]."""
    are_held: np.ndarray
    """True if sampling is deferred, bool [rows]."""
    are_probed: np.ndarray
    """True if tokens may have to be probed, bool [rows]."""
    num_with_stop_ids: int = 0
    """Rows in use with stop ids."""
    num_with_routing: int = 0
    """Rows in use with routing rows."""
    num_with_columns: int = 0
    """Rows in use with columns."""
    num_held: int = 0
    """Rows in use with deferred sampling."""
    num_probed: int = 0
    """Rows in use whose tokens may have to be probed."""


class RowTimes(NamedTuple):
    """Monotonic times of the sequences in the rows, float64 [rows]."""

    accepted_at: np.ndarray
    """Arrival of the request."""
    token_at: np.ndarray
    """Time of the last token; NaN before the first."""
    published_at: np.ndarray
    """Time of the last update to the client in this row; -inf before the first."""


class SingleChunks(NamedTuple):
    """Constant arrays for chunks that continue after the last sampled token, [rows]."""

    lengths: np.ndarray
    token_ids: np.ndarray
    samples: np.ndarray


class RowTable:
    """State of the sequences in all rows, as arrays [rows] or [rows, ...]."""

    def __init__(self, *, num_rows: int, max_tokens: int, page_size: int) -> None:
        pages_per_row = -(-max_tokens // page_size)
        counters = np.zeros((NUM_COUNTERS, num_rows), np.int64)
        self.page_size = page_size
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.generations = np.arange(num_rows, dtype=np.int64)
        """Owner of each row, int64 [rows]; a result for a former owner is dropped.

        A sequence that changes rows counts as another owner, so no number repeats in the table.
        """
        self.num_departures = 0
        """Number of times that any row was left."""
        self.state = RowArrays(
            counters.T,
            token_ids=np.zeros((num_rows, max_tokens), np.int32),
            logprobs=np.zeros((num_rows, max_tokens), np.float32),
            ranks=np.zeros((num_rows, max_tokens), np.int32),
            page_ids=np.zeros((num_rows, pages_per_row), np.int32),
            page_generations=np.zeros((num_rows, pages_per_row), np.int64),
        )
        self.num_tokens, self.num_computed = counters[NUM_TOKENS], counters[NUM_COMPUTED]
        self.num_pages, self.targets, self.limits = counters[NUM_PAGES], counters[TARGET], counters[LIMIT]
        """The counters of all rows, each int64 [rows]."""
        self.capacities = np.zeros(num_rows, np.int64)
        """Tokens that fit into the pages of each row."""
        self.wants = RowWants(
            np.full((num_rows, 1), NO_TOKEN, np.int32),
            is_incremental=np.zeros(num_rows, np.bool_),
            routing=np.zeros(num_rows, np.bool_),
            columns=np.zeros(num_rows, np.int64),
            are_held=np.zeros(num_rows, np.bool_),
            are_probed=np.zeros(num_rows, np.bool_),
        )
        self.times = RowTimes(
            np.zeros(num_rows), token_at=np.full(num_rows, np.nan), published_at=np.full(num_rows, -np.inf)
        )
        self.singles = SingleChunks(
            np.ones(num_rows, np.int32),
            token_ids=np.full(num_rows, LAST_SAMPLED, np.int32),
            samples=np.ones(num_rows, np.bool_),
        )

    def take(self, row: int, sequence: Sequence) -> None:
        """Move a waiting sequence into a free row."""
        assert self.sequences[row] is None and sequence.row == NO_ROW, f"row {row} is taken"
        view = RowArrays(*map(itemgetter(row), self.state))
        for values, own in zip(view, sequence.state, strict=True):
            values[: len(own)] = own
        sequence.state = view
        self._record_wants(row, sequence)
        self.capacities[row] = view.counters[NUM_PAGES] * self.page_size
        of_rows, times = self.times, sequence.times
        of_rows.accepted_at[row], of_rows.token_at[row] = times.accepted_at, times.token_at
        of_rows.published_at[row] = -np.inf
        self.sequences[row], sequence.row = sequence, row

    def leave(self, sequence: Sequence) -> None:
        """Move a sequence out of its row; tokens in flight are dropped."""
        row, state = sequence.row, sequence.state
        num_tokens, num_pages = int(state.counters[NUM_TOKENS]), int(state.counters[NUM_PAGES])
        sequence.state = RowArrays(
            state.counters.copy(),
            token_ids=state.token_ids[:num_tokens].copy(),
            logprobs=state.logprobs[:num_tokens].copy(),
            ranks=state.ranks[:num_tokens].copy(),
            page_ids=state.page_ids[:num_pages].copy(),
            page_generations=state.page_generations[:num_pages].copy(),
        )
        self.sequences[row], sequence.row = None, NO_ROW
        sequence.times.token_at = float(self.times.token_at[row])
        self.generations[row] += len(self.generations)
        self.num_departures += 1
        wants = self.wants
        wants.num_with_stop_ids -= bool(sequence.rules.stop_token_ids)
        wants.num_with_routing -= sequence.request.wants_rows
        wants.num_with_columns -= sequence.evidence.columns.bits > 0
        wants.num_held -= sequence.is_held
        wants.num_probed -= bool(wants.are_probed[row])

    def end_probe(self, row: int) -> None:
        """Record that no tokens of the sequence in a row remain to be probed."""
        wants = self.wants
        wants.num_probed -= bool(wants.are_probed[row])
        wants.are_probed[row] = False

    def add_pages(self, rows: np.ndarray, page_ids: np.ndarray, *, generations: np.ndarray) -> np.ndarray:
        """Append a page to each of `rows` (all different); return its index in each row."""
        indices = self.num_pages[rows]
        state = self.state
        state.page_ids[rows, indices] = page_ids
        state.page_generations[rows, indices] = generations
        self.num_pages[rows] = indices + 1
        self.capacities[rows] += self.page_size
        return indices

    def extend(self, row: int, page_ids: np.ndarray, *, generations: np.ndarray) -> None:
        """Append several pages to a row."""
        first = int(self.num_pages[row])
        last = first + len(page_ids)
        state = self.state
        state.page_ids[row, first:last] = page_ids
        state.page_generations[row, first:last] = generations
        self.num_pages[row] = last
        self.capacities[row] = last * self.page_size

    def places(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return KV slots and page generations of positions; all [N]."""
        indices, offsets = np.divmod(positions, self.page_size)
        state = self.state
        return state.page_ids[rows, indices] * self.page_size + offsets, state.page_generations[rows, indices]

    def _record_wants(self, row: int, sequence: Sequence) -> None:
        """Record the requirements of the new sequence of a row."""
        wants, request, stop_ids = self.wants, sequence.request, sequence.rules.stop_token_ids
        missing = len(stop_ids) - wants.stop_ids.shape[1]
        if missing > 0:
            wants.stop_ids = np.pad(wants.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        wants.stop_ids[row] = NO_TOKEN
        wants.stop_ids[row, : len(stop_ids)] = list(stop_ids)
        wants.num_with_stop_ids += bool(stop_ids)
        wants.is_incremental[row] = request.incremental
        wants.routing[row] = request.wants_rows
        wants.num_with_routing += request.wants_rows
        wants.columns[row] = sequence.evidence.columns.bits
        wants.num_with_columns += sequence.evidence.columns.bits > 0
        is_held, is_probed = sequence.is_held, sequence.is_probed
        wants.are_held[row], wants.are_probed[row] = is_held, is_probed
        wants.num_held += is_held
        wants.num_probed += is_probed
