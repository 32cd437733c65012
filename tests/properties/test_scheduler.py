"""The scheduler keeps its books under any order of events, and every step computes on the right keys and values.

The device is simulated by what each KV slot stands for: the prefix of tokens it was computed from. A chunk may only
attend to slots that stand for its own prefix, so a page that was given away too early, shared wrongly, or never
announced to the hosts is found as soon as it is read.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayserve_moe.requests import FinishReason, GenerationRequest, SamplingParams
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.scheduler import Schedule, Scheduler, StepLimits
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS, StepPlan, StepResult

STOP_TOKEN_ID = 0
VOCABULARY = 1000
MOST_STEPS = 3000
MOST_UNFINISHED = 12


class ShadowDevice:
    """Page tables as plans announce them, and the prefix that each KV slot stands for."""

    def __init__(self, limits: StepLimits) -> None:
        self._page_size = limits.page_size
        self._pages: dict[tuple[int, int], int] = {}
        self._prefix_of: dict[int, tuple[int, ...]] = {}
        self.sampling: dict[int, tuple[float, int, int]] = {}

    def run(self, plan: StepPlan, known: list[list[int]]) -> None:
        """Compute all chunks; `known[c]` are the known tokens of the sequence of chunk c."""
        changes = zip(plan.pages.rows, plan.pages.indices, plan.pages.page_ids, strict=True)
        for row, index, page in changes:
            assert page != 0, "page 0 belongs to nobody"
            self._pages[int(row), int(index)] = int(page)
        for row, floats, integers in zip(plan.sampling.rows, plan.sampling.floats, plan.sampling.integers, strict=True):
            self.sampling[int(row)] = float(floats[0]), int(integers[1]), int(integers[2])
        written: set[int] = set()
        for chunk in range(plan.num_chunks):
            row, start, length = (
                int(field[chunk]) for field in (plan.chunk_rows, plan.chunk_starts, plan.chunk_lengths)
            )
            for position in range(start, start + length):
                slot = self._slot(row, position)
                assert slot not in written, "two tokens of one step share a slot"
                written.add(slot)
                self._prefix_of[slot] = tuple(known[chunk][: position + 1])
        for chunk in range(plan.num_chunks):
            row, end = int(plan.chunk_rows[chunk]), int(plan.chunk_starts[chunk] + plan.chunk_lengths[chunk])
            for position in range(end):
                held = self._prefix_of.get(self._slot(row, position))
                assert held == tuple(known[chunk][: position + 1]), f"position {position} has lost its keys and values"

    def _slot(self, row: int, position: int) -> int:
        page = self._pages[row, position // self._page_size]
        return page * self._page_size + position % self._page_size


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, stop, fail, are aborted and preempted, over pools that are too small for them."""

    @initialize(
        num_rows=st.integers(1, 4),
        step_tokens=st.sampled_from([32, 40, 64, 96]),
        chunk_tokens=st.sampled_from([1, 5, 16, 64]),
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(2, 14),
        seed=st.integers(0, 2**32 - 1),
    )
    def set_up(self, num_rows, step_tokens, chunk_tokens, page_size, num_pages, seed):
        self.limits = StepLimits(num_rows, step_tokens, min(chunk_tokens, step_tokens), page_size)
        self.allocator = PageAllocator(num_pages)
        self.scheduler = Scheduler(self.limits, self.allocator)
        self.device = ShadowDevice(self.limits)
        self.longest = self.allocator.num_usable * page_size
        self.generator = np.random.default_rng(seed)
        self.choices: list[Sequence] = []
        self.num_submitted = 0

    @property
    def unfinished(self) -> list[Sequence]:
        return [choice for choice in self.choices if choice.finish is None]

    @precondition(lambda self: len(self.unfinished) < MOST_UNFINISHED)
    @rule(prompt_share=st.floats(0.0, 1.0), num_new=st.integers(0, 12), n=st.integers(1, 4), can_stop=st.booleans())
    def submit(self, prompt_share, num_new, n, can_stop):
        num_new = min(num_new, self.longest - 1)
        prompt_len = max(1, round(prompt_share * min(self.longest - num_new, 60)))
        prompt = self.generator.integers(1, VOCABULARY, prompt_len).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=num_new, n=n, temperature=0.5)
        request = GenerationRequest(f"r{self.num_submitted}", prompt, sampling)
        stops = frozenset([STOP_TOKEN_ID] if can_stop else [])
        choices = [Sequence(request, i, seed=self.num_submitted, stop_token_ids=stops) for i in range(n)]
        self.num_submitted += 1
        self.choices += choices
        self.scheduler.add(choices)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if self.scheduler.has_work:
                self._step()

    @precondition(lambda self: self.unfinished)
    @rule(which=st.integers(0, 1000))
    def abort(self, which):
        choice = self.unfinished[which % len(self.unfinished)]
        self.scheduler.end(choice, FinishReason("abort"))
        self.scheduler.release(choice)

    @precondition(lambda self: self.scheduler.running)
    @rule(which=st.integers(0, 1000))
    def preempt(self, which):
        running = self.scheduler.running
        self.scheduler.preempt(running[which % len(running)])

    @invariant()
    def books_are_right(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_work:
                break
            self._step()
        assert not self.unfinished, "a request never ends"
        assert self.allocator.num_free == self.allocator.num_usable, "pages are lost"

    def _step(self):
        schedule = self.scheduler.schedule()
        self._check_plan(schedule)
        plan = schedule.plan
        ids = self.generator.integers(0, VOCABULARY, plan.num_chunks)
        ids[self.generator.random(plan.num_chunks) < 0.05] = STOP_TOKEN_ID
        ids = np.where(plan.chunk_samples, ids, -1).astype(np.int32)
        finite = (self.generator.random(plan.num_chunks) > 0.02) | ~plan.chunk_samples
        num_outputs = [sequence.num_outputs for sequence in schedule.sequences]
        result = StepResult(plan.step_id, ids, np.zeros(plan.num_chunks), finite)
        ended = self.scheduler.commit(schedule, result)
        for sequence, before, token_id, is_finite in zip(schedule.sequences, num_outputs, ids, finite, strict=True):
            self._check_end(sequence, before, int(token_id), bool(is_finite))
        assert set(ended) == {sequence for sequence in schedule.sequences if sequence.finish is not None}
        for sequence in ended:
            self.scheduler.release(sequence)
        self.scheduler.check_integrity()

    def _check_plan(self, schedule: Schedule) -> None:
        plan, limits = schedule.plan, self.limits
        assert plan.num_chunks > 0, "work is pending and nothing is planned"
        assert len(set(plan.chunk_rows.tolist())) == plan.num_chunks, "a row has two chunks"
        assert plan.chunk_rows.min() >= 0 and plan.chunk_rows.max() < limits.num_rows
        assert (plan.chunk_lengths >= 1).all() and (plan.chunk_lengths <= limits.chunk_tokens).all()
        longer = plan.chunk_lengths[plan.chunk_lengths > 1]
        assert sum(-(-longer // PREFILL_BLOCK_TOKENS) * PREFILL_BLOCK_TOKENS) <= limits.step_tokens
        known, place = [], 0
        for chunk, sequence in enumerate(schedule.sequences):
            start, length = int(plan.chunk_starts[chunk]), int(plan.chunk_lengths[chunk])
            assert start == sequence.num_computed and start + length <= sequence.num_tokens
            expected = sequence.tokens(start, start + length)
            np.testing.assert_array_equal(plan.token_ids[place : place + length], expected)
            place += length
            is_last = start + length == sequence.num_tokens
            assert plan.chunk_samples[chunk] == (is_last and sequence.request.sampling.max_new_tokens > 0)
            known.append(sequence.tokens(0, sequence.num_tokens).tolist())
        assert place == plan.num_tokens
        self.device.run(plan, known)
        for sequence in schedule.sequences:
            assert self.device.sampling[sequence.row] == (0.5, sequence.seed, sequence.choice_index)

    def _check_end(self, sequence: Sequence, num_outputs: int, token_id: int, is_finite: bool) -> None:
        wanted = sequence.request.sampling.max_new_tokens
        if not is_finite:
            assert sequence.finish is not None and sequence.finish.kind == "error"
            assert sequence.num_outputs == num_outputs
            return
        assert sequence.num_outputs == num_outputs + (token_id >= 0) <= wanted
        if token_id in sequence.stop_token_ids:
            assert sequence.finish == FinishReason("stop", matched=token_id)
        elif sequence.num_outputs == wanted and sequence.is_prompt_computed:
            assert sequence.finish == FinishReason("length")
        else:
            assert sequence.finish is None


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30)
