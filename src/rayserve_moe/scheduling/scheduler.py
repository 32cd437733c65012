"""Deciding what each step computes: who runs, how much of whose prompt, who waits, who is preempted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from rayserve_moe.requests import FinishReason
from rayserve_moe.scheduling.admission_order import next_to_admit
from rayserve_moe.scheduling.data_rank import DataRank
from rayserve_moe.scheduling.plan_builder import PlanBuilder, Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS, StepPlan, StepResult
from rayserve_moe.scheduling.token_commit import commit_tokens


@dataclass(frozen=True)
class StepLimits:
    """What one step may hold on each data-parallel rank, and how much a rank can keep.

    `num_rows` sequences, `step_tokens` prompt tokens in all and `chunk_tokens` of one sequence; `num_pages` pages of
    `page_size` tokens; sequences of up to `max_tokens`. Without `caches_prefixes` only the choices of one request
    share pages.
    """

    num_rows: int
    step_tokens: int
    chunk_tokens: int
    page_size: int
    num_pages: int
    max_tokens: int
    num_data_ranks: int = 1
    caches_prefixes: bool = True


@dataclass(frozen=True)
class Preemption:
    """A sequence that lost its pages: what it had computed, and where that was."""

    sequence: Sequence
    num_computed: int
    page_ids: np.ndarray
    page_generations: np.ndarray


@dataclass(frozen=True)
class Commit:
    """What a result brought: rows that got a token, and the sequences that it ended, which still hold their pages."""

    rows: np.ndarray
    ended: list[Sequence]


class Scheduler:
    """Continuous batching over the data-parallel ranks.

    Running sequences go first, oldest first; what is left of the step admits waiting ones. A step may be planned
    before the result of the one before it is known: a sequence then goes on from the token that is on its way. When
    pages run out, the youngest running sequence gives its own back and waits at the front. The choices of a request
    beyond the first wait for its prompt and then find it cached.
    """

    def __init__(self, limits: StepLimits, *, weight_version: str = "0") -> None:
        num_rows = limits.num_rows
        self._limits = limits
        self._weight_version = weight_version
        self.table = RowTable(
            num_rows=num_rows * limits.num_data_ranks, max_tokens=limits.max_tokens, page_size=limits.page_size
        )
        self.ranks = [
            DataRank(i, range(i * num_rows, (i + 1) * num_rows), num_pages=limits.num_pages, table=self.table)
            for i in range(limits.num_data_ranks)
        ]
        self.waiting: deque[Sequence] = deque()
        self.preemptions: list[Preemption] = []
        self.num_preemptions = 0
        self._next_step_id = 0

    @property
    def running(self) -> list[Sequence]:
        """All sequences that have a row, oldest first within a rank."""
        return [sequence for rank in self.ranks for sequence in rank.running]

    @property
    def caches_prefixes(self) -> bool:
        return self._limits.caches_prefixes

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(rank.running for rank in self.ranks)

    def add(self, choices: list[Sequence]) -> None:
        """Queue the choices of a request; those after the first follow its prompt."""
        leader, *followers = choices
        leader.followers = followers
        request = leader.request
        for sequence in choices:
            sequence.choices = choices
            shared = (self._weight_version, request.cache_salt)
            sequence.namespace = shared if self._limits.caches_prefixes else request.request_id
        self.waiting.append(leader)

    def schedule(self, *, captures_all: bool = False) -> Schedule:
        """Plan the next step. Its plan is empty when all that runs is on its way.

        `captures_all` has the routing of the step brought back even where no sequence of it wants any.
        """
        builder = PlanBuilder(self._next_step_id, self.table)
        self._next_step_id += 1
        num_preemptions, budgets = self.num_preemptions, []
        for rank in self.ranks:
            rows, starts = self._grow_decoding(rank, builder)
            budgets.append(self._continue_prefill(rank, builder))
            if self.num_preemptions != num_preemptions:
                rows, starts = self._active_rows(rank)
            if len(rows):
                builder.add_singles(rank.index, rows, starts)
                self.table.num_computed[rows] = starts + 1
        if self.num_preemptions == num_preemptions:
            while self._admit_next(builder, budgets):
                pass
        schedule = builder.build(captures_all=captures_all)
        for sequence, _ in schedule.completed:
            self.ranks[sequence.data_rank].start_decoding(sequence)
        return schedule

    def empty_plan(self) -> StepPlan:
        """A plan that computes nothing; it fetches the result of the step before it."""
        self._next_step_id += 1
        return StepPlan(self._next_step_id - 1)

    def commit(self, schedule: Schedule, result: StepResult) -> Commit:
        """Take over what a step sampled; tokens of sequences that have left their row since are dropped."""
        rows, endings = commit_tokens(self.table, schedule, result)
        for sequence, epoch in schedule.completed:
            row = sequence.row
            if row == NO_ROW or self.table.epochs[row] != epoch:
                continue
            if sequence.limit == sequence.num_prompt_tokens:
                endings.append((row, FinishReason("length")))
            if not any(ended == row and reason.kind == "error" for ended, reason in endings):
                self.ranks[sequence.data_rank].cache_computed(sequence, sequence.num_prompt_tokens)
            self._release_followers(sequence)
        return Commit(rows, [self._end_row(row, reason) for row, reason in endings])

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out of the queues; it keeps its pages until `release`."""
        sequence.finish = reason
        if sequence.row != NO_ROW:
            self.ranks[sequence.data_rank].dismiss(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release_followers(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back the pages of an ended sequence; whole ones stay cached for as long as there is room."""
        assert sequence.finish is not None, "only ended sequences are released"
        self._give_up_pages(sequence)
        if not self._limits.caches_prefixes and all(choice.finish for choice in sequence.choices):
            for rank in self.ranks:
                rank.tree.clear(sequence.namespace)

    def preempt(self, sequence: Sequence) -> None:
        """Take row and pages from a running sequence and put it at the front of the queue."""
        self.num_preemptions += 1
        self.ranks[sequence.data_rank].dismiss(sequence)
        num_computed = min(sequence.num_computed, sequence.num_tokens)
        pages = (sequence.pages, sequence.page_generations)
        self.preemptions.append(Preemption(sequence, num_computed, *pages))
        sequence.num_to_recompute = max(sequence.num_to_recompute, num_computed)
        self._give_up_pages(sequence)
        self.waiting.appendleft(sequence)

    def flush(self) -> None:
        """Forget all cached prefixes; what runs keeps its pages."""
        for rank in self.ranks:
            rank.flush()

    def check_integrity(self) -> None:
        """Assert that rows and pages add up against an independent count. Call between steps."""
        for rank in self.ranks:
            rank.check_integrity()
        owners = [id(sequence) for sequence in self.table.sequences if sequence is not None]
        assert sorted(owners) == sorted(map(id, self.running)), "rows and running sequences differ"
        for sequence in self.waiting:
            assert sequence.row == NO_ROW and len(sequence.pages) == 0, "a waiting sequence has a row or pages"

    def _grow_decoding(self, rank: DataRank, builder: PlanBuilder) -> tuple[np.ndarray, np.ndarray]:
        """Give every decoding sequence of a rank the page its next token needs, preempting the youngest for room.

        Returns what `_active_rows` does.
        """
        table = self.table
        while True:
            rows, starts = self._active_rows(rank)
            is_full = starts >= table.capacities[rows]
            if not np.count_nonzero(is_full):
                return rows, starts
            short = rows[is_full]
            pages = rank.take_pages(len(short))
            if pages is not None:
                indices = table.add_pages(short, pages, generations=rank.allocator.generations[pages])
                builder.add_page_each(short, indices, pages)
                return rows, starts
            self.preempt(rank.running[-1])

    def _active_rows(self, rank: DataRank) -> tuple[np.ndarray, np.ndarray]:
        """Decoding rows of a rank that still have a token to compute, and its position. One token each: the last."""
        table, rows = self.table, rank.decoding_rows
        starts = table.num_computed[rows]
        is_active = starts < table.targets[rows]
        if np.count_nonzero(is_active) == len(rows):
            return rows, starts
        return rows[is_active], starts[is_active]

    def _continue_prefill(self, rank: DataRank, builder: PlanBuilder) -> int:
        """Go on with prompts, oldest first; returns what is left of the rank's token budget.

        The youngest sequence makes room where pages are short. None of a rank's decoding ones is in the plan yet.
        """
        budget = self._limits.step_tokens
        for sequence in list(rank.prefilling):
            length = self._chunk_length(sequence.num_uncomputed, budget) if sequence.row != NO_ROW else 0
            if length and self._grow(sequence, length, builder):
                self._add_chunk(sequence, length, builder)
                budget -= _step_cost(length)
        return budget

    def _admit_next(self, builder: PlanBuilder, budgets: list[int]) -> bool:
        """Move one waiting sequence into a row of the rank that has most of it cached; False where it does not fit."""
        ranks = [rank for rank in self.ranks if rank.free_rows]
        if not ranks or not self.waiting:
            return False
        place = next_to_admit(self.waiting, cached_tokens=lambda s: max(rank.num_cached(s) for rank in ranks))
        sequence = self.waiting[place]
        by_cache_and_load = sorted(ranks, key=lambda rank: (-rank.num_cached(sequence), len(rank.running)))
        for rank in by_cache_and_load:
            if self._admit_to(rank, sequence, builder, budgets):
                for passed_over in list(self.waiting)[:place]:
                    passed_over.num_passed_over += 1
                self.waiting.remove(sequence)
                return True
        return False

    def _admit_to(self, rank: DataRank, sequence: Sequence, builder: PlanBuilder, budgets: list[int]) -> bool:
        """Start a waiting sequence on `rank` if its known tokens find pages there and the step has room for some."""
        prefix = rank.lock_prefix(sequence)
        num_tokens, cached = sequence.num_tokens, prefix.num_tokens
        length = self._chunk_length(num_tokens - cached, budgets[rank.index])
        missing = -(-num_tokens // self._limits.page_size) - len(prefix.page_ids)
        if length == 0 or rank.num_available < missing:
            rank.tree.unlock(prefix)
            return False
        rank.admit(sequence, prefix)
        if sequence.num_to_recompute:
            sequence.recomputed = (cached, max(cached, min(sequence.num_to_recompute, sequence.num_prompt_tokens)))
        else:
            sequence.num_cached = cached
        builder.add_row(sequence)
        grown = self._grow(sequence, length, builder)
        assert grown, "room was checked before admission"
        self._add_chunk(sequence, length, builder)
        budgets[rank.index] -= _step_cost(length)
        return True

    def _add_chunk(self, sequence: Sequence, length: int, builder: PlanBuilder) -> None:
        is_last = sequence.num_computed + length == sequence.num_tokens
        samples = is_last and sequence.num_tokens < sequence.limit
        builder.add_chunk(sequence, length, samples=samples, completes=is_last)
        self.table.num_computed[sequence.row] += length

    def _chunk_length(self, uncomputed: int, budget: int) -> int:
        """Tokens of a prompt that this step computes; a single token always fits, longer chunks take blocks."""
        wanted = min(uncomputed, self._limits.chunk_tokens)
        return wanted if wanted == 1 else min(wanted, budget // PREFILL_BLOCK_TOKENS * PREFILL_BLOCK_TOKENS)

    def _grow(self, sequence: Sequence, length: int, builder: PlanBuilder) -> bool:
        """Give `sequence` pages for `length` more tokens; False where it had to make room itself."""
        rank, held = self.ranks[sequence.data_rank], len(sequence.pages)
        missing = -(-(sequence.num_computed + length) // self._limits.page_size) - held
        while (pages := rank.take_pages(max(missing, 0))) is None:
            victim = rank.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        self.table.extend(sequence.row, pages, generations=rank.allocator.generations[pages])
        builder.add_pages(sequence, first=held)
        return True

    def _give_up_pages(self, sequence: Sequence) -> None:
        """Release the pages of a sequence out of its row, and cache what it has computed, submitted steps included.

        Not so after a failure: it may have been the keys and values.
        """
        rank, failed = self.ranks[sequence.data_rank], sequence.finish is not None and sequence.finish.kind == "error"
        if len(sequence.pages) and not failed:
            rank.cache_computed(sequence, min(sequence.num_computed, sequence.num_tokens - 1))
        rank.give_up_pages(sequence)

    def _release_followers(self, leader: Sequence) -> None:
        """Queue the other choices of a request, to find its prompt cached."""
        followers, leader.followers = [f for f in leader.followers if f.finish is None], []
        self.waiting.extendleft(reversed(followers))

    def _end_row(self, row: int, reason: FinishReason) -> Sequence:
        sequence = self.table.sequences[row]
        assert sequence is not None, f"row {row} has no sequence to end"
        self.end(sequence, reason)
        return sequence


def _step_cost(length: int) -> int:
    """Tokens of the step's budget that a chunk takes: none for a single one, whole blocks for a longer one."""
    return 0 if length == 1 else -(-length // PREFILL_BLOCK_TOKENS) * PREFILL_BLOCK_TOKENS
