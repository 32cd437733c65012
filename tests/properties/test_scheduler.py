"""The scheduler keeps its books under any order of events, and nothing that happens shows in what comes out.

Steps are planned before the result of the one before is known. `tests.support.devices.simulated_device` finds every
step that would compute on wrong keys and values, or on the entry of another past where layers keep entries; what each
sequence has to come to is known beforehand. Requests carry random hints about their pages.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayserve_moe.config.settings import CacheSettings, SchedulerSettings
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.scheduling.data_rank import DataRank
from rayserve_moe.scheduling.scheduler import Schedule, Scheduler, StepLimits, finish_session
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED, PREFILL_BLOCK_TOKENS, HostSizes, StepResult
from rayserve_moe.scheduling.verify_rows import samples_that_count
from rayserve_moe.state.entries import EntryState
from rayserve_moe.state.groups import EntryGroup, page_groups
from tests.support.devices.simulated_device import STOP_TOKEN_ID, VOCABULARY, Past, SimulatedDevice, drawn
from tests.support.engine.random_hints import random_retention, random_session
from tests.support.session.hypothesis_examples import examples

LONGEST_PROMPT = 60
MOST_NEW = 12
MOST_STEPS = 3000
LONGER = 3
"""Times that prompts and pools are larger where entries stand at multiples of 64."""
MOST_UNFINISHED = 12
ABORT = FinishReason("abort")


class SchedulerMachine(RuleBasedStateMachine):
    """Requests with common beginnings come, run, stop, fail, are aborted and preempted, over pools too small for them.

    Between two rules a step is in flight, its result not committed.
    """

    @initialize(
        num_rows=st.integers(1, 4),
        step_tokens=st.sampled_from([32, 40, 64, 96]),
        chunk_tokens=st.sampled_from([1, 5, 16, 64]),
        page_size=st.sampled_from([1, 2, 4, 16]),
        num_pages=st.integers(2, 24) | st.integers(48, 96),
        num_data_ranks=st.integers(1, 2),
        caches_prefixes=st.booleans(),
        overlaps=st.sampled_from([True, True, False]),
        windows=st.sampled_from([(0,), (0,), (0, 1), (0, 5), (0, 16), (0, 3, 21)]),
        entry_tokens=st.sampled_from([0, 0, 16, 64]),
        num_kept=st.integers(0, 9),
        interval=st.sampled_from([0, 0, 64]),
        max_drafts=st.sampled_from([0, 0, 1, 3, 7]),
        num_hosted=st.sampled_from([0, 0, 3, 12, 60]),
        seed=st.integers(0, 2**32 - 1),
    )
    def set_up(
        self,
        num_rows,
        step_tokens,
        chunk_tokens,
        page_size,
        num_pages,
        num_data_ranks,
        caches_prefixes,
        overlaps,
        windows,
        entry_tokens,
        num_kept,
        interval,
        max_drafts,
        num_hosted,
        seed,
    ):
        # No pages beyond those that rows see at once, unless some are restored: what is cached behind windows has to
        # make way.
        scheduler = SchedulerSettings(max_running_requests=num_rows, max_step_tokens=step_tokens)
        cache = CacheSettings(page_size=page_size, enable_prefix_caching=num_hosted > 0)
        self.scale = LONGER if entry_tokens == 64 else 1
        num_pages *= self.scale
        self.limits = StepLimits(
            num_rows=num_rows,
            step_tokens=step_tokens,
            chunk_tokens=min(chunk_tokens, step_tokens),
            page_size=page_size,
            num_pages=num_pages,
            max_tokens=LONGEST_PROMPT * self.scale + MOST_NEW,
            num_data_ranks=num_data_ranks,
            caches_prefixes=caches_prefixes,
            page_groups=page_groups(windows, num_pages, scheduler=scheduler, cache=cache),
            entry_groups=(EntryGroup("delta", entry_tokens, 1 + 2 * num_rows + num_kept, interval),)[
                : entry_tokens > 0
            ],
            verify_rows=num_rows * (1 + max_drafts) // 2,
            evicts_by_session=True,
            protected_share=0.5,
            max_protected_s=9.0,
        )
        self.device = SimulatedDevice(drawn, limits=self.limits)
        assert self.device.memory is not None, "it has limits"
        self.memory = self.device.memory
        self.windows, self.scheduler = windows, Scheduler(self.limits)
        for rank in self.scheduler.ranks:
            rank.tree.clock = lambda: float(self.num_submitted)
        self.overlaps, self.max_drafts = overlaps and not max_drafts, max_drafts
        self.generator = np.random.default_rng(seed)
        self.hosted = None
        if num_hosted:
            self.hosted = HostedPages(self.scheduler, HostSizes(num_hosted, num_hosted // 3))
            for rank in self.scheduler.ranks:
                assert rank.host is not None
                rank.host.pays = lambda _: self.generator.random() < 0.9
        self.longest = min((num_pages - 1) * page_size, self.limits.max_tokens)
        self.beginning = np.random.default_rng(seed).integers(1, VOCABULARY, (2, LONGEST_PROMPT * self.scale))
        self.seed = seed
        self.choices: list[Sequence] = []
        self.pasts: dict[Sequence, Past] = {}
        self.num_submitted = 0
        self.in_flight: tuple[Schedule, StepResult] | None = None

    @property
    def unfinished(self) -> list[Sequence]:
        return [choice for choice in self.choices if choice.finish is None]

    @precondition(lambda self: len(self.unfinished) < MOST_UNFINISHED)
    @rule(
        which=st.integers(0, 1),
        num_common=st.integers(0, LONGEST_PROMPT),
        num_own=st.integers(0, 6),
        num_new=st.integers(0, MOST_NEW),
        n=st.integers(1, 4),
        can_stop=st.booleans(),
        salt=st.sampled_from(["", "", "salt"]),
    )
    def submit(self, which, num_common, num_own, num_new, n, can_stop, salt):
        own = np.arange(VOCABULARY + self.num_submitted, VOCABULARY + self.num_submitted + num_own)
        self._submit([*self.beginning[which, : num_common * self.scale], *own] or [1], num_new, n, can_stop, salt)

    @precondition(lambda self: len(self.unfinished) < MOST_UNFINISHED and len(self.unfinished) < len(self.choices))
    @rule(which=st.integers(0, 1000), num_new=st.integers(0, MOST_NEW))
    def go_on_with_a_conversation(self, which, num_new):
        ended = [choice for choice in self.choices if choice.finish is not None]
        before = ended[which % len(ended)]
        prompt = [*before.token_ids[: before.num_tokens], 1, 2, 3]
        self._submit(prompt, num_new, 1, True, before.request.cache_salt)

    @rule()
    def finish_a_session(self):
        finish_session(self.scheduler, random_session(self.generator) or "")

    @precondition(lambda self: self.is_busy)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if self.is_busy:
                self._step()

    @precondition(lambda self: self.unfinished)
    @rule(which=st.integers(0, 1000))
    def abort(self, which):
        choice = self.unfinished[which % len(self.unfinished)]
        self.scheduler.end(choice, ABORT)
        self.scheduler.release(choice)

    @precondition(lambda self: self.scheduler.running)
    @rule(which=st.integers(0, 1000))
    def preempt(self, which):
        running = self.scheduler.running
        self.scheduler.preempt(running[which % len(running)])

    @rule(one_in_four=st.integers(0, 3))
    def flush(self, one_in_four):
        if one_in_four == 0:
            self.scheduler.flush()
            self.memory.num_flushes += 1

    @invariant()
    def books_are_right(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            self._check_prefixes()

    @property
    def is_busy(self) -> bool:
        return self.scheduler.has_work or self.in_flight is not None

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(MOST_STEPS * self.scale):
            if not self.is_busy:
                break
            self._step()
        assert not self.unfinished, "a request never ends"
        for rank in self.scheduler.ranks:
            if rank.host is not None:
                rank.host.arrive()
                self.memory.move(None)
            assert rank.num_available == rank.allocator.num_usable, "an ended sequence holds on to pages"
            self._check_cached(rank)
        self.scheduler.flush()
        for rank in self.scheduler.ranks:
            assert rank.allocator.num_free == rank.allocator.num_usable, "pages are lost"
        self.scheduler.check_integrity()

    def _submit(self, prompt: list[int], num_new: int, n: int, can_stop: bool, salt: str) -> None:
        num_new = min(num_new, self.longest - 1)
        prompt_ids = np.asarray(prompt[: min(self.longest - num_new, LONGEST_PROMPT * self.scale)], np.int32)
        sampling = SamplingParams(max_new_tokens=num_new, n=n, temperature=0.5)
        request = GenerationRequest(
            f"r{self.num_submitted}",
            prompt_ids,
            sampling,
            cache_salt=salt,
            session=random_session(self.generator),
            retention=random_retention(self.generator),
        )
        seed = (self.seed + self.num_submitted) % 2**32
        stops = frozenset([STOP_TOKEN_ID] if can_stop else [])
        choices = [Sequence(request, i, seed=seed, stop_token_ids=stops) for i in range(n)]
        self.num_submitted += 1
        self.choices += choices
        self.scheduler.add(choices)
        namespace = salt if self.limits.caches_prefixes else request.request_id
        self.pasts |= {choice: Past(choice, namespace=namespace) for choice in choices}

    def _step(self) -> None:
        num_preemptions = self.scheduler.num_preemptions
        schedule = self.scheduler.schedule(draft=self._draft if self.max_drafts else None)
        if self.hosted is not None:
            schedule = self.hosted.plan(schedule, None)
            self.memory.move(schedule.plan.moves)
        submitted = (schedule, self._run(schedule)) if schedule.plan.num_chunks else None
        restores = schedule.plan.moves is not None and len(schedule.plan.moves.restores) > 0
        is_stuck = submitted is None and self.in_flight is None and not restores
        assert not is_stuck or self.scheduler.num_preemptions > num_preemptions, "work is pending, nothing is planned"
        before, self.in_flight = self.in_flight, submitted
        self._commit(before)
        if not self.overlaps:
            self._commit(self.in_flight)
            self.in_flight = None
        self.scheduler.check_integrity()

    def _run(self, schedule: Schedule) -> StepResult:
        plan, limits = schedule.plan, self.limits
        rows, lengths = plan.chunks.rows, plan.chunks.lengths
        assert np.bincount(rows).max() <= 1 + plan.chunks.max_drafts, "a row has two chunks"
        assert rows.min() >= 0 and rows.max() < limits.num_rows * limits.num_data_ranks
        assert (np.diff(rows // limits.num_rows) >= 0).all(), "the chunks of a rank stand apart"
        assert lengths.min() >= 0 and lengths.max() <= limits.chunk_tokens and lengths.sum() == plan.num_tokens
        assert np.count_nonzero(lengths == 0) == plan.chunks.num_forks and lengths[0], "a fork has nothing to fork off"
        blocks = np.where(lengths > 1, -(-lengths // PREFILL_BLOCK_TOKENS), 0)
        per_rank = np.bincount(rows // limits.num_rows, weights=blocks)
        assert (per_rank * PREFILL_BLOCK_TOKENS <= limits.step_tokens).all(), "a rank has more than a step holds"
        assert ((plan.chunks.token_ids == LAST_SAMPLED) <= np.repeat(lengths == 1, lengths)).all()
        owners = [self.scheduler.table.sequences[row] for row in rows.tolist()]
        samples = np.bincount(rows[plan.chunks.samples] // limits.num_rows)
        most_singles = limits.num_rows if blocks.any() else max(limits.num_rows, limits.verify_rows)
        assert samples.max(initial=0) <= most_singles, "a rank has more samples than a step holds"
        result = self.device.run(plan, [self.pasts[owner] for owner in owners])
        for owner, start, length in zip(owners, plan.chunks.starts.tolist(), lengths.tolist(), strict=True):
            if owner.row in plan.sampling.rows and start and length:
                assert self.memory.oldest(owner.row, start) == self.memory.num_flushes, "found in spite of a flush"
                assert owner.queue.num_to_recompute or owner.cache.num_cached == start
                if self.memory.entries is not None:
                    assert self.memory.entries.columns[owner.row, 2] == start, "it starts where no entry is"
        return result

    def _check_prefixes(self) -> None:
        """The prefixes that are found end where every state is usable, as late as can be."""
        for sequence in self.scheduler.waiting:
            for rank in self.scheduler.ranks:
                known = sequence.token_ids[: sequence.num_tokens - 1]
                page_ids = rank.tree.matching_pages(sequence.cache.namespace, known)
                usable = [n for n in range(len(page_ids) + 1) if self._is_usable(rank, page_ids[:n])]
                assert rank.num_cached(sequence) == usable[-1] * self.limits.page_size

    def _is_usable(self, rank: DataRank, page_ids: np.ndarray) -> bool:
        """Whether a sequence can start behind these pages."""
        position = len(page_ids) * self.limits.page_size
        pages_of_positions = np.repeat(page_ids, self.limits.page_size)
        for window, page_of in zip(self.windows, rank.page_maps, strict=bool(rank.page_maps)):
            if window and not page_of[pages_of_positions[max(0, position + 1 - window) :]].all():
                return False
        entries = rank.states[-1] if rank.entry_tokens else None
        return not position or not isinstance(entries, EntryState) or bool(entries.place_of[page_ids[-1]])

    def _draft(self, rows: np.ndarray) -> dict[int, np.ndarray]:
        """What follows, or something else from a random place on."""
        drafts = {}
        for row in rows.tolist():
            owner = self.scheduler.table.sequences[row]
            drafted = np.array(self.pasts[owner].tokens[owner.num_tokens :][: self.max_drafts], np.int32)
            drafted[self.generator.integers(0, self.max_drafts + 2) :] = VOCABULARY + 5
            drafts[row] = drafted
        return drafts

    def _commit(self, step: tuple[Schedule, StepResult] | None) -> None:
        if step is None:
            return
        schedule, result = step
        counts = None
        if schedule.verifies:
            counts = samples_that_count(self.scheduler.table, schedule, result=result)
        rows, ended = self.scheduler.commit(schedule, result, counts=counts)
        for row in rows.tolist():
            owner = self.scheduler.table.sequences[row]
            if owner is not None:
                self._check_tokens(owner)
        for sequence in ended:
            past, finish = self.pasts[sequence], sequence.finish
            self._check_tokens(sequence)
            assert finish is not None and finish.kind == past.finish
            assert sequence.num_tokens == len(past.tokens), "it ended too early, or too late"
            assert sequence.num_computed >= max(sequence.num_prompt_tokens, sequence.num_tokens - 1), (
                "it ends uncomputed"
            )
            assert finish.matched == (STOP_TOKEN_ID if finish.kind == "stop" else None)
            self.scheduler.release(sequence)

    def _check_tokens(self, sequence: Sequence) -> None:
        known = self.pasts[sequence].tokens[: sequence.num_tokens]
        assert sequence.token_ids[: sequence.num_tokens].tolist() == known
        first = sequence.num_prompt_tokens
        expected = -np.asarray(known[first:])
        np.testing.assert_allclose(sequence.state.logprobs[first : sequence.num_tokens], expected, rtol=1e-6)

    def _check_cached(self, rank) -> None:
        """All that later requests could find holds what they will take it for."""
        num_found = 0
        for past, sequence in {past.stands_for.tobytes(): (past, s) for s, past in self.pasts.items()}.values():
            prefix = rank.tree.match(sequence.cache.namespace, np.asarray(past.tokens, np.int32))
            for place, page_of in enumerate(rank.page_maps or [np.arange(self.limits.num_pages)]):
                page_ids = page_of[prefix.page_ids]
                assert self.memory.holds(rank.index, page_ids, past.stands_for, place=place), "a page was written over"
            num_found = max(num_found, len(prefix.page_ids))
        assert (num_found > 0) <= self.limits.caches_prefixes, "pages are kept that nobody may find"


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = examples(120, stateful_step_count=30)
