"""Deciding what each step computes: who runs, how much of whose prompt, who waits, who is preempted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rayserve_moe.requests import FinishReason
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.plan_builder import PlanBuilder
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS, StepPlan, StepResult


@dataclass(frozen=True)
class StepLimits:
    """What one step may hold: rows, prompt tokens in all, prompt tokens of one sequence; and tokens per page."""

    num_rows: int
    step_tokens: int
    chunk_tokens: int
    page_size: int


@dataclass(frozen=True)
class Preemption:
    """A sequence that lost its pages: what it had computed, and where that was."""

    sequence: Sequence
    num_computed: int
    pages: list[int]
    page_generations: list[int]


@dataclass(frozen=True)
class Schedule:
    """A plan, the owners of its chunks, and who had to make room for it."""

    plan: StepPlan
    sequences: list[Sequence]
    preemptions: list[Preemption]


class Scheduler:
    """Continuous batching, first come first served.

    Running sequences go first, oldest first; what is left of the step admits waiting ones. When pages run out, the
    youngest running sequence gives its own back and waits at the front, to be computed anew. The choices of a request
    beyond the first wait for its prompt and then share its whole pages.
    """

    def __init__(self, limits: StepLimits, allocator: PageAllocator) -> None:
        self._limits = limits
        self._allocator = allocator
        self._free_rows = list(range(limits.num_rows - 1, -1, -1))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._next_step_id = 0
        self._preemptions: list[Preemption] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, choices: list[Sequence]) -> None:
        """Queue the choices of a request; those after the first follow its prompt."""
        leader, *followers = choices
        leader.followers = followers
        self.waiting.append(leader)

    def schedule(self) -> Schedule:
        """Plan the next step. The plan is empty only when nothing runs or waits."""
        builder = PlanBuilder(self._next_step_id)
        self._next_step_id += 1
        num_preemptions = self.num_preemptions
        budget = self._continue_running(builder, self._limits.step_tokens)
        if self.num_preemptions == num_preemptions:
            self._admit_waiting(builder, budget)
        preemptions, self._preemptions = self._preemptions, []
        return Schedule(builder.build(), builder.sequences, preemptions)

    def harvest_plan(self) -> StepPlan:
        """An empty plan, which only brings back routing rows."""
        self._next_step_id += 1
        return StepPlan(self._next_step_id - 1)

    def commit(self, schedule: Schedule, result: StepResult) -> list[Sequence]:
        """Take over what a step computed; returns the sequences that it ended, which still hold their pages."""
        ended = []
        chunks = zip(schedule.sequences, schedule.plan.chunk_lengths, result.token_ids, result.finite, strict=True)
        for sequence, length, token_id, finite in chunks:
            sequence.num_computed += int(length)
            if sequence.is_prompt_computed and sequence.followers:
                self._release_followers(sequence)
            reason = _reason_to_end(sequence, int(token_id), bool(finite))
            if reason is not None:
                self.end(sequence, reason)
                ended.append(sequence)
        return ended

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out of the queues; it keeps its pages until `release`."""
        sequence.finish = reason
        if sequence.row != NO_ROW:
            self.running.remove(sequence)
            self._give_back_row(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release_followers(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back the pages of an ended sequence."""
        assert sequence.finish is not None, "only ended sequences are released"
        self._allocator.release(sequence.let_go())

    def preempt(self, sequence: Sequence) -> None:
        """Take row and pages from a running sequence and put it at the front of the queue."""
        self._preemptions.append(Preemption(sequence, sequence.num_computed, sequence.pages, sequence.page_generations))
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._give_back_row(sequence)
        self._allocator.release(sequence.let_go())
        self.waiting.appendleft(sequence)

    def check_integrity(self) -> None:
        """Assert that rows and pages add up against an independent count. Call between steps."""
        held = [s.pages for s in (*self.running, *self.waiting)]
        self._allocator.check_integrity(held)
        rows = [s.row for s in self.running] + self._free_rows
        assert sorted(rows) == list(range(self._limits.num_rows)), "rows are lost or shared"
        assert all(s.row == NO_ROW for s in self.waiting), "a waiting sequence has a row"

    def _continue_running(self, builder: PlanBuilder, budget: int) -> int:
        for sequence in list(self.running):
            if sequence.row == NO_ROW:
                continue
            length = self._chunk_length(sequence, budget)
            if length and self._grow(sequence, length, builder):
                builder.add_chunk(sequence, length)
                budget -= _step_cost(length)
        return budget

    def _admit_waiting(self, builder: PlanBuilder, budget: int) -> None:
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            length = self._chunk_length(sequence, budget)
            if not length or not self._has_room_for(sequence):
                return
            self.waiting.popleft()
            sequence.row = self._free_rows.pop()
            self.running.append(sequence)
            builder.add_row(sequence)
            grown = self._grow(sequence, length, builder)
            assert grown, "room was checked before admission"
            builder.add_chunk(sequence, length)
            budget -= _step_cost(length)

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        """Tokens of `sequence` that this step computes; a single token always fits, longer chunks take blocks."""
        wanted = min(sequence.num_uncomputed, self._limits.chunk_tokens)
        if wanted == 1:
            return 1
        whole_blocks = budget // PREFILL_BLOCK_TOKENS * PREFILL_BLOCK_TOKENS
        return min(wanted, whole_blocks)

    def _grow(self, sequence: Sequence, length: int, builder: PlanBuilder) -> bool:
        """Give `sequence` pages for `length` more tokens; False where it had to make room itself."""
        held = len(sequence.pages)
        missing = -(-(sequence.num_computed + length) // self._limits.page_size) - held
        while (pages := self._allocator.allocate(max(missing, 0))) is None:
            if self._drop_held_by_waiting():
                continue
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.hold(pages, [int(self._allocator.generations[p]) for p in pages])
        builder.add_pages(sequence, first=held)
        return True

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether all known tokens of a waiting sequence find pages; others that wait give up theirs for it."""
        needed = -(-sequence.num_tokens // self._limits.page_size) - len(sequence.pages)
        while self._allocator.num_free < needed:
            if not self._drop_held_by_waiting(keep=sequence):
                return False
        return True

    def _drop_held_by_waiting(self, keep: Sequence | None = None) -> bool:
        """Let the last waiting sequence that holds shared pages give them up; False where there is none."""
        for sequence in reversed(self.waiting):
            if sequence.pages and sequence is not keep:
                self._allocator.release(sequence.let_go())
                sequence.num_cached = 0
                return True
        return False

    def _release_followers(self, leader: Sequence) -> None:
        """Queue the other choices of a request, with the whole pages of the prompt that the first has computed."""
        followers, leader.followers = [f for f in leader.followers if f.finish is None], []
        page_size = self._limits.page_size
        num_shared = min(leader.num_computed, leader.num_prompt_tokens - 1) // page_size
        for follower in reversed(followers):
            self._allocator.share(leader.pages[:num_shared])
            follower.hold(leader.pages[:num_shared], leader.page_generations[:num_shared])
            follower.num_computed = follower.num_cached = num_shared * page_size
            self.waiting.appendleft(follower)

    def _give_back_row(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        sequence.row = NO_ROW


def _step_cost(length: int) -> int:
    """Tokens of the step's budget that a chunk takes: none for a single one, whole blocks for a longer one."""
    return 0 if length == 1 else -(-length // PREFILL_BLOCK_TOKENS) * PREFILL_BLOCK_TOKENS


def _reason_to_end(sequence: Sequence, token_id: int, finite: bool) -> FinishReason | None:
    if not finite:
        return FinishReason("error", message="the model produced logits that are not finite")
    if token_id >= 0:
        sequence.append(token_id)
        return sequence.finish_after(token_id)
    if sequence.is_prompt_computed and sequence.request.sampling.max_new_tokens == 0:
        return FinishReason("length")
    return None
