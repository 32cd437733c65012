"""The rows of device state and the sequences in them, as arrays over all rows."""

from __future__ import annotations

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


class RowTable:
    """State of the sequence in each row, [rows] or [rows, ...].

    `generations` counts the owners of a row: what was started for one owner must not be used for the next.
    `capacities` are the tokens that the pages of a row hold. `num_departures` counts how often any row was left,
    `num_with_stop_ids`, `num_wanting_routing` and `num_wanting_columns` the rows in use whose sequence has or wants
    that. `wanted_columns` has bit i of a row set if its sequence wants column i of `OUTPUT_COLUMNS`. Samples of
    `num_held` rows `are_held`, tokens of `num_probed` rows may be probed.
    `singles` and `all_true` are constants: lengths and token ids of chunks that go on from the token sampled last.
    """

    def __init__(self, *, num_rows: int, max_tokens: int, page_size: int) -> None:
        pages_per_row = -(-max_tokens // page_size)
        self.page_size = page_size
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.generations = np.zeros(num_rows, np.int64)
        self.token_ids = np.zeros((num_rows, max_tokens), np.int32)
        self.logprobs = np.zeros((num_rows, max_tokens), np.float32)
        self.ranks = np.zeros((num_rows, max_tokens), np.int32)
        self.page_ids = np.zeros((num_rows, pages_per_row), np.int32)
        self.page_generations = np.zeros((num_rows, pages_per_row), np.int64)
        self.capacities = np.zeros(num_rows, np.int64)
        self.is_incremental = np.zeros(num_rows, np.bool_)
        self.published_at = np.full(num_rows, -np.inf)
        self.accepted_at = np.zeros(num_rows)
        self.token_at = np.full(num_rows, np.nan)
        self.wants_routing = np.zeros(num_rows, np.bool_)
        self.wanted_columns = np.zeros(num_rows, np.int64)
        self.are_held = np.zeros(num_rows, np.bool_)
        self.num_held = 0
        self.are_probed = np.zeros(num_rows, np.bool_)
        self.num_probed = 0
        self.stop_ids = np.full((num_rows, 1), NO_TOKEN, np.int32)
        self.num_departures = 0
        self.num_with_stop_ids = 0
        self.num_wanting_routing = 0
        self.num_wanting_columns = 0
        self.singles = np.stack([np.ones(num_rows, np.int32), np.full(num_rows, LAST_SAMPLED, np.int32)])
        self.all_true = np.ones(num_rows, np.bool_)
        self._counters = np.zeros((NUM_COUNTERS, num_rows), np.int64)
        self.num_tokens = self._counters[NUM_TOKENS]
        self.num_computed = self._counters[NUM_COMPUTED]
        self.num_pages = self._counters[NUM_PAGES]
        self.targets = self._counters[TARGET]
        self.limits = self._counters[LIMIT]

    def take(self, row: int, sequence: Sequence) -> None:
        """Move a waiting sequence into a free row."""
        assert self.sequences[row] is None and sequence.row == NO_ROW, f"row {row} is taken"
        view = RowArrays(
            self._counters[:, row],
            token_ids=self.token_ids[row],
            logprobs=self.logprobs[row],
            ranks=self.ranks[row],
            page_ids=self.page_ids[row],
            page_generations=self.page_generations[row],
        )
        for values, own in zip(view, sequence.state, strict=True):
            values[: len(own)] = own
        sequence.state = view
        self._keep_stop_ids(row, sequence.rules.stop_token_ids)
        self.wants_routing[row] = sequence.request.return_routed_experts
        self.num_with_stop_ids += bool(sequence.rules.stop_token_ids)
        self.num_wanting_routing += sequence.request.return_routed_experts
        self.wanted_columns[row] = sequence.evidence.columns.bits
        self.num_wanting_columns += sequence.evidence.columns.bits > 0
        self.are_held[row] = sequence.is_held
        self.num_held += sequence.is_held
        self.are_probed[row] = sequence.is_probed
        self.num_probed += sequence.is_probed
        self.capacities[row] = sequence.state.counters[NUM_PAGES] * self.page_size
        self.is_incremental[row] = sequence.request.incremental
        self.published_at[row] = -np.inf
        self.accepted_at[row], self.token_at[row] = sequence.times.accepted_at, sequence.times.token_at
        self.sequences[row], sequence.row = sequence, row

    def leave(self, sequence: Sequence) -> None:
        """Move a sequence out of its row; tokens still on their way are given up."""
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
        sequence.times.token_at = float(self.token_at[row])
        self.generations[row] += 1
        self.num_departures += 1
        self.num_with_stop_ids -= bool(sequence.rules.stop_token_ids)
        self.num_wanting_routing -= sequence.request.return_routed_experts
        self.num_wanting_columns -= sequence.evidence.columns.bits > 0
        self.num_held -= sequence.is_held
        self.num_probed -= bool(self.are_probed[row])

    def end_probe(self, row: int) -> None:
        """Record that nothing is left to be probed of the sequence in a row."""
        self.num_probed -= bool(self.are_probed[row])
        self.are_probed[row] = False

    def add_pages(self, rows: np.ndarray, page_ids: np.ndarray, *, generations: np.ndarray) -> np.ndarray:
        """Append one page to each of `rows` (all different); returns the index it took in each."""
        indices = self.num_pages[rows]
        self.page_ids[rows, indices] = page_ids
        self.page_generations[rows, indices] = generations
        self.num_pages[rows] = indices + 1
        self.capacities[rows] += self.page_size
        return indices

    def extend(self, row: int, page_ids: np.ndarray, *, generations: np.ndarray) -> None:
        """Append several pages to one row."""
        first = int(self.num_pages[row])
        last = first + len(page_ids)
        self.page_ids[row, first:last] = page_ids
        self.page_generations[row, first:last] = generations
        self.num_pages[row] = last
        self.capacities[row] = last * self.page_size

    def places(self, rows: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """KV slots of positions, and the allocations that they belong to; all [N]."""
        indices, offsets = np.divmod(positions, self.page_size)
        return self.page_ids[rows, indices] * self.page_size + offsets, self.page_generations[rows, indices]

    def _keep_stop_ids(self, row: int, stop_ids: frozenset[int]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = list(stop_ids)
