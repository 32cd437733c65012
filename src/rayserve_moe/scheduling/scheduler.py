"""Scheduler: decides which sequences run in each step, the size of prompt chunks, admission and preemption."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rayserve_moe.requests.finish_reason import LENGTH, FinishReason
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.scheduling.data_rank import DataRank, num_found, running_adapters
from rayserve_moe.scheduling.forks import PromptPins, cache_with_forks, fork_followers, release_followers
from rayserve_moe.scheduling.page_events import PageEvents, WeightsNamed
from rayserve_moe.scheduling.plan_builder import Schedule, build_schedule
from rayserve_moe.scheduling.rank_step import RankStep, StepLimits
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence, record_weights
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult
from rayserve_moe.scheduling.token_commit import NOT_FINITE, commit_probe, commit_tokens
from rayserve_moe.scheduling.token_probe import probe_for
from rayserve_moe.scheduling.verify_rows import Draft, add_decoding
from rayserve_moe.scheduling.waiting_queue import WaitingQueue, next_to_admit


@dataclass(frozen=True)
class Preemption:
    """A preempted sequence and its state at that moment; the sequence may already run on another rank."""

    sequence: Sequence
    data_rank: int
    num_computed: int
    """Positions that were computed."""
    pages: np.ndarray
    page_generations: np.ndarray
    origins: tuple[tuple[int, int, str], ...]
    """As `CacheState.origins`."""


Commit = tuple[np.ndarray, list[Sequence]]
"""Rows with a new token, repeated per token, and ended sequences, which still hold their pages."""


class Scheduler:
    """Continuous batching over the data-parallel ranks.

    Running sequences come first, oldest first; the rest of the budget admits waiting sequences (chunked prefill, as in
    Sarathi-Serve). A step may be planned before the result of the previous step is known: a sequence then continues
    from the token in flight. When pages run out, the youngest running sequence is preempted and waits at the front. The
    choices of a request beyond the first wait for its prompt, and fork off it or find it cached. Sequences in `held`
    are not admitted, and none is admitted to ranks outside of `open_ranks`.
    """

    def __init__(self, limits: StepLimits, *, weight_version: str = "0") -> None:
        self._limits, num_rows = limits, limits.num_rows
        self.weight_version = weight_version
        self.table = RowTable(
            num_rows=num_rows * limits.num_data_ranks, max_tokens=limits.max_tokens, page_size=limits.page_size
        )
        self.ranks = [
            DataRank(
                i,
                range(i * num_rows, (i + 1) * num_rows),
                num_pages=limits.num_pages,
                table=self.table,
                page_groups=limits.page_groups,
                entry_groups=limits.entry_groups,
            )
            for i in range(limits.num_data_ranks)
        ]
        for rank in self.ranks:
            rank.tree.max_protected = int(limits.protected_share * rank.allocator.num_usable)
        self.open_ranks, self.waiting = self.ranks, WaitingQueue()
        self._pins = PromptPins(self.ranks)
        self.held: list[Sequence] = []
        self.captures_all = False
        """True if every step captures routing, for sequences that find its pages cached later."""
        self.on_preemption: Callable[[Preemption], object] = _ignore
        """Called with every preemption, before its pages are released."""
        self.page_events: PageEvents | None = None
        self._delayed = set[Sequence]()
        """Waiting sequences whose pages are being restored."""
        self.num_preemptions = self._next_step_id = 0

    @property
    def running(self) -> list[Sequence]:
        """Return all sequences that have a row, oldest first within a rank."""
        return [sequence for rank in self.ranks for sequence in rank.running]

    @property
    def caches_prefixes(self) -> bool:
        return self._limits.caches_prefixes

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.held) or any(rank.running for rank in self.ranks)

    def add(self, choices: list[Sequence]) -> None:
        """Queue the choices of a request; the others follow the prompt of the first."""
        leader, *followers = choices
        leader.group.followers = followers
        request = leader.request
        version = request.version_label(self.weight_version)
        probe = probe_for(request, version) if request.wants_evidence else None
        for sequence in choices:
            sequence.group.choices = choices
            sequence.cache.namespace = namespace_of(self, request)
            sequence.cache.owner = request.session if self._limits.evicts_by_session else None
            sequence.evidence.probe = probe
            record_weights(sequence, self.weight_version)
        if self._limits.protected_share:
            self._pins.add(choices)
        self.waiting.add(leader)

    def schedule(self, *, draft: Draft | None = None) -> Schedule:
        """Plan the next step. The plan is empty if all running sequences wait for a step in flight.

        A step with `draft` follows a committed step, or a step after which the devices draft. In the latter case
        `resolve_awaited` completes it.
        """
        num_preemptions, limits, defers = self.num_preemptions, self._limits, draft is not None
        steps = [RankStep(r, limits=limits, preempt=self.preempt, defers_decoding=defers) for r in self.open_ranks]
        self._take_arrivals()
        for step in steps:
            step.add_running()
        if self.num_preemptions == num_preemptions:
            for step in steps if not (self.waiting and self.waiting[0].queue.num_to_recompute) else ():
                if step.has_followers:
                    fork_followers(step, page_size=limits.page_size)
            closed = set[int]()
            while self._admit_next(steps, closed):
                pass
        max_drafts = 0 if draft is None else add_decoding(steps, draft, limits=limits)
        for step in steps:
            step.add_state_values()
            for sequence in step.new_sequences:
                self._pins.start(sequence)
        schedule = build_schedule(
            self._next_step_id, steps, table=self.table, captures_all=self.captures_all, max_drafts=max_drafts
        )
        self._next_step_id += 1
        for sequence, _ in schedule.completed:
            self.ranks[sequence.data_rank].start_decoding(sequence)
        return schedule

    def empty_plan(self) -> StepPlan:
        """Return a plan that computes nothing; it fetches the result of the previous step."""
        self._next_step_id += 1
        return StepPlan(self._next_step_id - 1)

    def commit(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None = None) -> Commit:
        """Append the accepted samples of a step to the sequences that are still in their row.

        `counts` None accepts all.
        """
        rows, endings = commit_tokens(self.table, schedule, result=result, counts=counts)
        if schedule.probed:
            ended, failed_rows = {row for row, _ in endings}, commit_probe(self.table, schedule, result=result)
            endings += [(row, NOT_FINITE) for row in dict.fromkeys(failed_rows) if row not in ended]
        failed = [row for row, reason in endings if reason.kind == "error"]
        for sequence, generation in schedule.completed:
            row = sequence.row
            if row == NO_ROW or self.table.generations[row] != generation:
                continue
            if sequence.limit == sequence.num_prompt_tokens and row not in failed:
                endings.append((row, LENGTH))
            if row not in failed:
                self.ranks[sequence.data_rank].cache_computed(sequence, sequence.num_prompt_tokens)
            if sequence.group.followers:
                release_followers(sequence, self.waiting)
        owned = [(sequence, reason) for row, reason in endings if (sequence := self.table.sequences[row])]
        for sequence, reason in owned:
            self.end(sequence, reason)
        return rows, [sequence for sequence, _ in owned]

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove a sequence from the queues; it keeps its pages until `release`."""
        sequence.finish = reason
        if sequence.row != NO_ROW:
            self.ranks[sequence.data_rank].dismiss(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.held:
            self.held.remove(sequence)
        self._pins.start(sequence)
        if sequence.group.followers:
            release_followers(sequence, self.waiting)

    def release(self, sequence: Sequence) -> None:
        """Release the pages of an ended sequence; whole pages stay cached until they are evicted."""
        assert sequence.finish is not None, "only ended sequences are released"
        self._give_up_pages(sequence)
        self._apply_retention(sequence)
        if self._is_private(sequence.request) and all(choice.finish for choice in sequence.group.choices):
            for rank in self.ranks:
                rank.tree.clear(sequence.cache.namespace)

    def preempt(self, sequence: Sequence) -> None:
        """Take row and pages from a running sequence and put it at the front of the queue."""
        self.num_preemptions += 1
        self.ranks[sequence.data_rank].dismiss(sequence)
        num_computed = min(sequence.num_computed, sequence.num_tokens)
        pages = (sequence.pages, sequence.page_generations)
        self.on_preemption(Preemption(sequence, sequence.data_rank, num_computed, *pages, sequence.cache.origins))
        queue = sequence.queue
        queue.num_to_recompute = max(queue.num_to_recompute, num_computed)
        self._give_up_pages(sequence)
        self.waiting.insert(0, sequence)

    def flush(self) -> None:
        """Flush the prefix cache; running sequences keep their pages."""
        for rank in self.ranks:
            rank.flush()

    def check_integrity(self) -> None:
        """Assert that rows and pages agree with an independent count. Call between steps."""
        self._pins.check_integrity()
        for rank in self.ranks:
            rank.check_integrity()
        owners = [id(sequence) for sequence in self.table.sequences if sequence is not None]
        assert sorted(owners) == sorted(map(id, self.running)), "rows and running sequences differ"
        for sequence in (*self.waiting, *self.held):
            assert sequence.row == NO_ROW and len(sequence.pages) == 0, "a waiting sequence has a row or pages"

    def _admit_next(self, steps: list[RankStep], closed: set[int]) -> bool:
        """Admit a waiting sequence to the rank that computes its prompt first; return False if none may be admitted.

        If that rank cannot take it in this step, it waits rather than being recomputed on another. The rank is added to
        `closed`, and other sequences of the same priority may still be admitted to the other ranks.
        """
        steps = [step for step in steps if step.rank.free_rows]
        waiting, among = self.waiting, self._waiting_for_others(closed) if closed else None
        if not (waiting if among is None else len(among)) or all(step.rank.index in closed for step in steps):
            return False
        place = next_to_admit(waiting, cached_tokens=lambda each: self._rank_steps(each, steps)[0], among=among)
        sequence = waiting[place]
        _, ranked = self._rank_steps(sequence, steps)
        if not ranked:
            return False
        first = ranked[0].rank.index
        open_steps = [] if first in closed else [step for step in ranked if step.rank.index not in closed]
        for step in open_steps:
            if self._delays(sequence, step.rank):
                return True
            if step.admit(sequence):
                if step.has_followers:
                    fork_followers(step, page_size=self._limits.page_size)
                for passed_over in range(place) if among is None else among[among < place].tolist():
                    waiting[passed_over].queue.num_passed_over += 1
                waiting.remove(sequence)
                return True
            if step.is_full:
                break
        closed.add(first)
        return True

    def _waiting_for_others(self, closed: set[int]) -> np.ndarray:
        """Return the places of sequences with the priority of the front, without those that wait for a closed rank."""
        equals = range(self.waiting.num_equal if self.waiting else 0)
        found = [place for place in equals if self.waiting[place].queue.awaited_rank not in closed]
        return np.array(found, np.intp)

    def _rank_steps(self, sequence: Sequence, steps: list[RankStep]) -> tuple[int, list[RankStep]]:
        """Sort the steps that may take a sequence by the tokens that their ranks compute until its prompt is done.

        Returns the number of its tokens that the first rank has cached, and the steps; (-1, []) if no step may take it.
        Records the first rank in the sequence.
        """
        num_cached = {step: num_found(step.rank, sequence) for step in steps if self._may_take(sequence, step.rank)}
        ranked = sorted(num_cached, key=lambda step: (step.backlog - num_cached[step], len(step.rank.running)))
        if not ranked:
            return -1, []
        sequence.queue.awaited_rank = ranked[0].rank.index
        return num_cached[ranked[0]], ranked

    def _give_up_pages(self, sequence: Sequence) -> None:
        """Release the pages of a sequence without a row, and cache its computed tokens, including submitted steps.

        After a failure nothing is cached, since its keys and values may be wrong.
        """
        rank, failed = self.ranks[sequence.data_rank], sequence.finish is not None and sequence.finish.kind == "error"
        if len(sequence.pages) and not failed:
            num_known = min(sequence.num_computed, sequence.num_tokens - 1)
            if len(sequence.group.choices) > 1:
                cache_with_forks(rank, sequence, num_tokens=num_known)
            else:
                rank.cache_computed(sequence, num_known)
        self._pins.pin(sequence)
        rank.release_pages(sequence)

    def _apply_retention(self, sequence: Sequence) -> None:
        """Apply the hints of an ended sequence to its cached pages."""
        cache, limits, retention = sequence.cache, self._limits, sequence.request.retention
        for num_tokens, seconds in retention.protected if limits.protected_share else ():
            token_ids = sequence.token_ids[: min(num_tokens, sequence.num_tokens)]
            tree, seconds = self.ranks[sequence.data_rank].tree, min(seconds, limits.max_protected_s)
            tree.protect(cache.namespace, token_ids, seconds=seconds)
        if (retention.ends_session or cache.ends_session) and cache.owner is not None:
            finish_session(self, cache.owner)

    def _take_arrivals(self) -> None:
        """Cache the pages that the last plan restored, so that sequences that waited for them may start."""
        self._delayed.clear()
        for rank in self.ranks:
            if rank.host is not None:
                rank.host.arrive()

    def _delays(self, sequence: Sequence, rank: DataRank) -> bool:
        """Return True if a sequence waits for pages that are being restored on a rank."""
        if rank.host is None or not rank.host.delays(sequence):
            return False
        self._delayed.add(sequence)
        return True

    def _may_take(self, sequence: Sequence, rank: DataRank) -> bool:
        """Return True if a sequence waits for no pages, and steps of a rank have a place for its adapter."""
        if sequence in self._delayed:
            return False
        key, here = sequence.request.adapter, running_adapters(rank)
        if not key or key in here:
            return True
        everywhere = here.union(*map(running_adapters, self.ranks))
        is_resident = key in everywhere or len(everywhere) < self._limits.max_adapters
        return is_resident and len(here) < self._limits.step_adapters

    def _is_private(self, request: GenerationRequest) -> bool:
        """Return True if only the choices of the request share its prefixes, as with forced routing."""
        return not self._limits.caches_prefixes or request.forced_routing is not None


def _ignore(preemption: Preemption) -> None:
    """Do nothing."""


def namespace_of(scheduler: Scheduler, request: GenerationRequest) -> Hashable:
    """Return the namespace of the cached prefixes of a request."""
    if scheduler._is_private(request):
        return request.request_id
    return (request.cache_salt, request.adapter) if request.adapter else (request.cache_salt,)


def unfinished(scheduler: Scheduler) -> list[Sequence]:
    """Return all choices that have not ended: running, waiting, or followers of another choice."""
    known = (*scheduler.running, *scheduler.waiting, *scheduler.held)
    found = {id(choice): choice for sequence in known for choice in sequence.group.choices}
    return [choice for choice in found.values() if choice.finish is None]


def finish_session(scheduler: Scheduler, session: str) -> None:
    """Let the cached pages of a session leave first, except those that other requests have used."""
    for rank in scheduler.ranks:
        rank.tree.order.finish(session)
    for choice in unfinished(scheduler):
        if choice.cache.owner == session:
            choice.cache.ends_session = True


def change_weights(scheduler: Scheduler, weight_version: str) -> None:
    """Switch to other weights, between steps, with no step in flight.

    The prefix cache is flushed, even if the version stays the same. Sequences whose prompt is not entirely computed are
    preempted, so that all rows of a prompt come from the same weights. Sequences that are sampling continue with their
    keys and values. If such a sequence is recomputed later, its routing rows are older than its keys, so its pages are
    not shared.
    """
    _name_weights(scheduler, weight_version)
    for sequence in reversed(scheduler.running):
        if sequence.num_outputs == 0 or sequence.num_computed < sequence.num_prompt_tokens:
            scheduler.preempt(sequence)
    scheduler.flush()
    for sequence in unfinished(scheduler):
        record_weights(sequence, weight_version)
        if sequence.num_outputs and sequence.request.wants_rows:
            sequence.cache.num_cacheable = sequence.num_prompt_tokens
        if (probe := sequence.evidence.probe) is not None:
            probe.change_weights(sequence.request.version_label(weight_version))


def rename_weights(scheduler: Scheduler, weight_version: str) -> None:
    """Change the version of the same weights from the next step on; all computed state stays."""
    _name_weights(scheduler, weight_version)
    for sequence in unfinished(scheduler):
        record_weights(sequence, weight_version)


def watch_pages(scheduler: Scheduler, events: PageEvents) -> None:
    """Record the content of the prefix cache, and all changes from now on."""
    scheduler.page_events = events
    events.record(0, WeightsNamed(scheduler.weight_version))
    for rank in scheduler.ranks:
        rank.tree.watch(partial(events.record, rank.index))


def _name_weights(scheduler: Scheduler, weight_version: str) -> None:
    scheduler.weight_version = weight_version
    if scheduler.page_events is not None:
        scheduler.page_events.record(0, WeightsNamed(weight_version))
