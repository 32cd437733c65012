"""Planning of a data-parallel rank's part of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.scheduling.chunk_demands import ChunkDemand
from rayserve_moe.scheduling.data_rank import DataRank
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence, chunk_demand
from rayserve_moe.scheduling.step_plan import MAX_FORCED_CHOICES, PREFILL_BLOCK_TOKENS, PageTableChanges
from rayserve_moe.state.groups import EntryGroup, PageGroup


@dataclass(frozen=True)
class StepLimits:
    """Limits of a step on each data-parallel rank, and of the rank's memory."""

    num_rows: int
    """Sequences."""
    step_tokens: int
    """Prompt tokens of a step."""
    chunk_tokens: int
    """Prompt tokens of a sequence in a step."""
    page_size: int
    """Tokens of a page."""
    num_pages: int
    """Pages of a rank, the null page included."""
    max_tokens: int
    """Tokens of a sequence."""
    num_data_ranks: int = 1
    caches_prefixes: bool = True
    """False: only the choices of the same request share pages."""
    page_groups: tuple[PageGroup, ...] = ()
    """Groups of layers that share a page table; empty for a single table of the rank's pages."""
    entry_groups: tuple[EntryGroup, ...] = ()
    """Groups of layers with entries."""
    verify_rows: int = 0
    """Single tokens of a step without prompts, for sequences with drafts."""
    evicts_by_session: bool = False
    """True: pages of ended sessions and superseded branches leave first."""
    protected_share: float = 0.0
    """Share of a rank's pages that requests may protect."""
    max_protected_s: float = 0.0
    """Maximum seconds of a protection."""
    max_adapters: int = 0
    """Adapters of the sequences that run on all ranks."""
    step_adapters: int = 0
    """Adapters of the sequences that run on a rank."""


class ChunkRun(NamedTuple):
    """Consecutive chunks of a step: all decoding sequences, or a single prompt chunk."""

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    token_ids: np.ndarray
    samples: np.ndarray
    """As in `Chunks`, as are the arrays before."""
    demand: ChunkDemand | None = None
    """Extra work of a chunk of a prompt."""


class RankStep:
    """Chunks that a rank computes in a step: first `add_running`, then any number of `admit`.

    If it `defers_decoding`, decoding sequences are left to `add_singles` afterwards. When pages run out, `preempt` is
    called with the rank's youngest sequence.
    """

    def __init__(
        self,
        rank: DataRank,
        *,
        limits: StepLimits,
        preempt: Callable[[Sequence], None],
        defers_decoding: bool = False,
    ) -> None:
        self.rank = rank
        self.runs: list[ChunkRun] = []
        """All chunks, in the order of the plan."""
        self.num_forks = 0
        """Chunks without tokens."""
        self.has_demands = False
        """Some run has a demand."""
        self.verifies = False
        """As in `Schedule`."""
        self.pages: list[PageTableChanges] = []
        """To be joined."""
        self.new_sequences: list[Sequence] = []
        """They have just taken their rows."""
        self.completed: list[tuple[Sequence, int]] = []
        """As in `Schedule`."""
        self.backlog = 0
        """Prompt tokens that running sequences compute in this step or later."""
        self._limits, self._preempt, self._defers_decoding = limits, preempt, defers_decoding
        self._budget, self._choices_left = limits.step_tokens, MAX_FORCED_CHOICES

    @property
    def is_full(self) -> bool:
        """Return True if the token budget of the step is spent."""
        return self._budget < PREFILL_BLOCK_TOKENS

    @property
    def has_followers(self) -> bool:
        """Return True if other choices wait for a prompt that this step completes."""
        return any(sequence.group.followers for sequence, _ in self.completed)

    def extend(self, other: RankStep) -> None:
        """Append the step of the next rank."""
        self.runs += other.runs
        self.num_forks += other.num_forks
        self.has_demands |= other.has_demands
        self.verifies |= other.verifies
        self.pages += other.pages
        self.new_sequences += other.new_sequences
        self.completed += other.completed

    def add_running(self) -> None:
        """Add the running sequences: chunks of prompts, oldest first, then a token of each decoding sequence.

        A preemption victim is not in the plan yet: it is younger than the prompts that are, and decoding sequences come
        last.
        """
        self._advance_states()
        num_running = len(self.rank.running)
        rows, starts = self._grow_decoding()
        self._continue_prefill()
        if len(self.rank.running) != num_running:
            rows, starts = self.decoding()
        if len(rows) and not self._defers_decoding:
            table, count = self.rank.table, len(rows)
            lengths, token_ids, samples = table.singles
            run = ChunkRun(rows, starts, lengths=lengths[:count], token_ids=token_ids[:count], samples=samples[:count])
            self.runs.append(run)
            table.num_computed[rows] = starts + 1

    def decoding(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the decoding rows that still have a token to compute, and its position."""
        table, rows = self.rank.table, self.rank.decoding_rows
        starts = table.num_computed[rows]
        is_active = starts < table.targets[rows]
        if np.count_nonzero(is_active) == len(rows):
            return rows, starts
        return rows[is_active], starts[is_active]

    def add_singles(self, rows: np.ndarray, starts: np.ndarray, *, token_ids: np.ndarray, verifies: bool) -> None:
        """Add chunks of a single token each that sample; `verifies` if some are drafts or awaited."""
        lengths, samples = np.ones(len(rows), np.int32), np.ones(len(rows), np.bool_)
        self.runs.append(ChunkRun(rows, starts, lengths=lengths, token_ids=token_ids, samples=samples))
        self.verifies |= verifies

    def admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence if pages for all its known tokens are available, and budget for some of them."""
        prefix = self.rank.lock_prefix(sequence)
        num_cached = prefix.num_pages * self._limits.page_size
        length = self._chunk_length(sequence, num_cached)
        missing = -(-sequence.num_tokens // self._limits.page_size) - prefix.num_pages
        if length == 0 or self.rank.num_available < missing:
            self.rank.tree.unlock(prefix)
            return False
        self.rank.admit(sequence, prefix)
        self.backlog += sequence.num_tokens - num_cached
        sequence.record_start(num_cached)
        self.new_sequences.append(sequence)
        self._add_pages(sequence, first=0)
        grown = self._grow(sequence, length)
        assert grown, "capacity was checked before admission"
        self._add_chunk(sequence, length)
        return True

    def add_state_values(self) -> None:
        """Add the values of rows that states have changed to the columns behind the page tables."""
        rank, column = self.rank, self.rank.table.state.page_ids.shape[1] * max(1, len(self.rank.page_maps))
        for state in rank.states:
            changes = state.take_row_values()
            if len(changes.rows):
                rows = changes.rows + rank.rows.start
                self.pages.append(PageTableChanges(rows, changes.columns + column, changes.values))

    def _advance_states(self) -> None:
        """Move the states to the position of each row's next query, or of its first query if drafts are awaited."""
        for state in self.rank.states:
            of_rank, table = slice(self.rank.rows.start, self.rank.rows.stop), self.rank.table
            positions = np.minimum(table.num_computed[of_rank], table.num_tokens[of_rank])
            state.advance(positions, table.state.page_ids[of_rank])

    def _grow_decoding(self) -> tuple[np.ndarray, np.ndarray]:
        """Give every decoding sequence the page that its next token needs; return as `decoding`."""
        rank, table = self.rank, self.rank.table
        while True:
            rows, starts = self.decoding()
            is_full = starts >= table.capacities[rows]
            if not np.count_nonzero(is_full):
                return rows, starts
            short = rows[is_full]
            pages = rank.take_pages(len(short))
            if pages is not None:
                indices = table.add_pages(short, pages, generations=rank.allocator.generations[pages])
                self.set_pages(short, indices, page_ids=pages)
                return rows, starts
            self._preempt(rank.running[-1])

    def _continue_prefill(self) -> None:
        for sequence in list(self.rank.prefilling):
            self.backlog += sequence.num_tokens - sequence.num_computed
            length = self._chunk_length(sequence, sequence.num_computed) if sequence.row != NO_ROW else 0
            if length and self._grow(sequence, length):
                self._add_chunk(sequence, length)

    def _add_chunk(self, sequence: Sequence, length: int) -> None:
        """Compute the next `length` known tokens of `sequence`; after the last token, sample if it may continue."""
        table, row, start = self.rank.table, sequence.row, sequence.num_computed
        stop = start + length
        is_last = stop == sequence.num_tokens
        run = ChunkRun(
            np.array([row]),
            np.array([start]),
            lengths=np.array([length]),
            token_ids=sequence.token_ids[start:stop].copy(),
            samples=np.array([is_last and stop < sequence.limit]),
            demand=chunk_demand(sequence, start, stop=stop),
        )
        self.runs.append(run)
        self.has_demands |= run.demand is not None
        if is_last:
            self.completed.append((sequence, int(table.generations[row])))
        table.num_computed[row] = stop
        if run.demand is not None and run.demand.forced is not None and run.demand.forced.index is not None:
            self._choices_left -= len(run.demand.forced.rows)
        if length > 1 or chunk_demand(sequence, start, stop=start + 1) is not None:
            self._budget -= -(-length // PREFILL_BLOCK_TOKENS) * PREFILL_BLOCK_TOKENS

    def _chunk_length(self, sequence: Sequence, start: int) -> int:
        """Return the number of known tokens from position `start` that this step computes.

        A single token always fits; longer chunks occupy whole blocks.
        """
        wanted = min(sequence.num_tokens - start, self._limits.chunk_tokens)
        if wanted == 1 and chunk_demand(sequence, start, stop=start + 1) is None:
            return 1
        length = min(wanted, self._budget // PREFILL_BLOCK_TOKENS * PREFILL_BLOCK_TOKENS)
        forced = sequence.request.forced_routing
        if forced is not None and forced.index is not None and start < forced.start + len(forced.index):
            length = min(length, max(0, forced.start - start) + self._choices_left)
        return self._whole_entries(sequence, start, length) if self.rank.entry_tokens else length

    def _whole_entries(self, sequence: Sequence, start: int, length: int) -> int:
        """Shorten a chunk so that it ends with an entry, and writes no entry after a kept entry.

        The devices write a row's entry with the first token after it. The last entry of the known tokens needs no cut.
        """
        grid, stop = self.rank.entry_tokens, start + length
        last = (sequence.num_tokens - 1) // grid * grid
        for kept in sequence.cache.kept_positions:
            if kept < last and start <= kept < stop:
                stop = min(stop, kept if kept > start else start + grid)
        if stop < sequence.num_tokens and stop // grid * grid > start:
            stop = stop // grid * grid
        return stop - start

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Give `sequence` pages for `length` more tokens; return False if it was itself preempted."""
        rank, held = self.rank, len(sequence.pages)
        missing = -(-(sequence.num_computed + length) // self._limits.page_size) - held
        while (pages := rank.take_pages(max(missing, 0))) is None:
            victim = rank.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        rank.table.extend(sequence.row, pages, generations=rank.allocator.generations[pages])
        self._add_pages(sequence, first=held)
        return True

    def _add_pages(self, sequence: Sequence, *, first: int) -> None:
        """Add the pages of its row from index `first` on."""
        pages = sequence.pages[first:]
        if len(pages):
            rows = np.full(len(pages), sequence.row)
            self.set_pages(rows, np.arange(first, first + len(pages)), page_ids=pages.copy())

    def set_pages(self, rows: np.ndarray, indices: np.ndarray, *, page_ids: np.ndarray) -> None:
        """Add the pages at `indices` of `rows` to all page tables."""
        page_maps = self.rank.page_maps
        if not page_maps:
            self.pages.append(PageTableChanges(rows, indices, page_ids))
            return
        for place, page_of in enumerate(page_maps):
            self.pages.append(PageTableChanges(rows, indices * len(page_maps) + place, page_of[page_ids]))
