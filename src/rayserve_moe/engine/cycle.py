"""The engine's step cycle: plan a step, submit it, commit the result of the previous step.

A step may be submitted while the drafts of the previous step are still on the devices. Its plan is completed after the
previous step commits.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from itertools import islice

import numpy as np

from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.executor import Executor, ExecutorFailure
from rayserve_moe.engine.recovery.losses import StepLosses
from rayserve_moe.engine.routing.capture import RoutingCapture
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.step_clock import StepClock, scheduler_statistics
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, RoutedExperts
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.rank_step import CANDIDATES
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sample_masks import sample_masks
from rayserve_moe.scheduling.scheduler import Commit, Scheduler, change_weights, rename_weights
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import AWAITED, DRAFTED, StepPlan, StepResult
from rayserve_moe.scheduling.verify_rows import samples_that_count, tokens_that_count

NO_ROWS = np.zeros(0, np.int64)


class StepCycle:
    """Drives scheduler, executor and routing capture step by step; knows nothing of clients.

    With `overlaps` the devices run a step while the host commits the one before it and plans the next, also with drafts
    where those are on the devices too, and no sequence wants each token here first: what one awaits of the one before
    is settled later. Otherwise a step with drafts follows on a committed one. `eplb` moves and counts experts. While
    `is_paused` no step is planned. `tally` is the sum over all steps, if they have any. With `losses` hosts are
    replaced where a step is lost; without, ExecutorFailure passes through.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        capture: RoutingCapture | None,
        overlaps: bool = True,
        eplb: EplbSteps | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.losses: StepLosses | None = None
        self.eplb = eplb
        self.speculation = speculation
        self.is_paused = False
        self._executor = executor
        self._capture = capture
        self._overlaps = overlaps
        self._in_flight: Schedule | None = None
        self._clock = StepClock()
        self.tally: np.ndarray | None = None
        self._ended_at: float | None = None  # the last run, if work was left

    @property
    def has_work(self) -> bool:
        return (self.scheduler.has_work and not self.is_paused) or self._in_flight is not None

    def run(self) -> Commit:
        """Plan and submit a step, and commit the one before, as `Scheduler.commit`; ended sequences are released."""
        if self.losses is not None and self.losses.trial_is_over:
            if self._in_flight is not None:
                return self.drain()
            self.losses.try_next(self.retract)
        started, speculation = time.perf_counter(), self.speculation
        tries, overlaps = _ways(speculation, self.scheduler, self._in_flight, overlaps=self._overlaps)
        if self._in_flight is not None and not (overlaps if tries else self._in_flight.plan.chunks.max_drafts == 0):
            return self.drain()
        draft = speculation.draft if speculation is not None and tries else None
        # A request that finds a cached prefix may want rows that another one computed.
        captures_all = self._capture is not None and self.scheduler.caches_prefixes
        schedule = self.scheduler.schedule(captures_all=captures_all, draft=draft)
        schedule = schedule if speculation is None else speculation.asking(schedule, self._in_flight)
        if self.eplb is not None:
            schedule = self.eplb.attach(schedule)
        self._retain_preempted()
        if self._capture is not None and not awaits(schedule.plan):
            self._capture.submit(schedule.plan, self.scheduler.table)
        self._clock.schedule_s += time.perf_counter() - started
        finished, committed = self._in_flight, self._exchange(schedule)
        if self._in_flight is not None and not overlaps:
            finished, committed = self._in_flight, self._exchange(None)
        if speculation is not None:
            self._note_time(speculation, finished, len(committed[0]), started)
        return committed

    def drain(self) -> Commit:
        """Commit the step in flight, if there is one, and plan none: then nothing runs."""
        return self._exchange(None) if self._in_flight is not None else (NO_ROWS, [])

    def retract(self) -> None:
        """Preempt everything that runs; it waits in the order it ran in. Call after `drain`."""
        for sequence in reversed(self.scheduler.running):
            self.scheduler.preempt(sequence)
        self._retain_finally()

    def lose(self, failure: ExecutorFailure, schedule: Schedule | None = None) -> Commit:
        """Give up what is submitted, and `schedule`, and replace all hosts, or raise; commits the end of a culprit."""
        if self.losses is None:
            raise failure
        lost, self._in_flight, self._ended_at = (self._in_flight, schedule), None, None
        blamed = self.losses.start_over(failure, [each.plan for each in lost if each], retract=self.retract)
        return NO_ROWS, [] if blamed is None else [self.end(*blamed)]

    def take_staged_weights(self, weight_version: str, *, are_sent: bool = False) -> bool:
        """Switch to staged weights, read or `are_sent`; False where a host was lost meanwhile. Call after `drain`."""
        assert self._in_flight is None, "a step is in flight"
        try:
            self._executor.execute(replace(self.scheduler.empty_plan(), takes_staged_weights=True))
        except ExecutorFailure as failure:
            self.lose(failure)
            return False
        change_weights(self.scheduler, weight_version)
        self._retain_finally()
        if self._capture is not None:
            self._capture.set_weight_version(weight_version)
        if self.eplb is not None:
            self.eplb.change_weights(are_sent=are_sent)
        return True

    def rename_weights(self, weight_version: str) -> None:
        """Call the current weights by another version. Call after `drain`."""
        rename_weights(self.scheduler, weight_version)
        if self._capture is not None:
            self._capture.set_weight_version(weight_version)

    def streamed_routing(self, sequence: Sequence) -> RoutedExperts | None:
        """The rows of a running sequence that its client does not have yet; None where they are not streamed."""
        if self._capture is None or not _streams_routing(sequence.request):
            return None
        return self._gather(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> Sequence:
        """End a sequence between steps and free its pages; returns it."""
        self.scheduler.end(sequence, reason)
        return self._release(sequence)

    def statistics(self) -> dict[str, float]:
        """Pages, running sequences, and the totals of the step clock by field name."""
        return scheduler_statistics(self.scheduler) | {
            "paused": float(self.is_paused),
            **{name: float(value) for name, value in asdict(self._clock).items()},
        }

    def _exchange(self, schedule: Schedule | None) -> Commit:
        """Submit a step, or none, and commit the one in flight, whose masks are filled now if it holds its samples."""
        plan = schedule.plan if schedule is not None else self.scheduler.empty_plan()
        failed: list[Sequence] = []
        if self._in_flight is not None and self._in_flight.plan.holds_samples:
            plan, failed = self._with_masks(plan, self._in_flight)
        submitted = time.perf_counter()
        try:
            result = self._executor.execute(plan)
        except ExecutorFailure as failure:
            rows, ended = self.lose(failure, schedule)
            return rows, [*failed, *ended]
        returned = time.perf_counter()
        finished, self._in_flight = self._in_flight, schedule if plan.num_chunks else None
        self._clock.transport_s += returned - submitted
        if finished is None:
            self._retain_finally()
            return NO_ROWS, []
        assert result is not None and result.step_id == finished.plan.step_id, "a result belongs to another step"
        has_drafts = finished.plan.chunks.ancestors is not None
        counts = samples_that_count(self.scheduler.table, finished, result=result) if has_drafts else None
        if self._capture is not None:
            belongs = None if counts is None else tokens_that_count(finished, counts)
            self._capture.absorb(result, belongs=belongs)
        self._retain_finally()
        if self.eplb is not None:
            self.eplb.absorb(result)
        if self.speculation is not None:
            self.speculation.absorb(finished, result, counts=counts)
        rows, ended = self.scheduler.commit(finished, result, counts=counts)
        for sequence in ended:
            self._release(sequence)
        self._in_flight = _settled(self._in_flight, finished, result, table=self.scheduler.table, capture=self._capture)
        ended += failed
        self._clock.note(finished, result, num_sampled=len(rows), commit_s=time.perf_counter() - returned)
        if result.tally is not None:
            self.tally = result.tally if self.tally is None else self.tally + result.tally
        if self.losses is not None:
            self.losses.note_commit()
        return rows, ended

    def _with_masks(self, plan: StepPlan, before: Schedule) -> tuple[StepPlan, list[Sequence]]:
        """Return a plan with the masks for the deferred samples of the step before, and the sequences that end."""
        started = time.perf_counter()
        masks, endings = sample_masks(self.scheduler.table, before)
        failed = [self.end(sequence, reason) for sequence, reason in endings]
        self._clock.mask_s += time.perf_counter() - started
        return replace(plan, masks=masks), failed

    def _note_time(self, speculation: Speculation, finished: Schedule | None, num_tokens: int, started: float) -> None:
        """Note what a step took from one commit to the next; from its start where nothing ran before."""
        ended_at = time.perf_counter()
        if finished is not None:
            since = started if self._ended_at is None else self._ended_at
            speculation.note_time(finished, num_tokens, seconds=ended_at - since)
        self._ended_at = ended_at if self.has_work else None

    def _release(self, sequence: Sequence) -> Sequence:
        """Collect the routing of an ended sequence where it is wanted, then free its pages."""
        self._retain_preempted()
        if self._capture is not None and sequence.request.return_routed_experts:
            sequence.routing.final = self._gather(sequence)
        self.scheduler.release(sequence)
        if self.speculation is not None:
            self.speculation.end(sequence)
        return sequence

    def _gather(self, sequence: Sequence) -> RoutedExperts:
        """Rows that its client does not have yet; streamed ones count as published from now on."""
        assert self._capture is not None, "without capture there are no rows"
        published = sequence.published
        routing = self._capture.gather(sequence, start=published.num_routing_rows)
        if _streams_routing(sequence.request):
            published.num_routing_rows += len(routing.rows)
        return routing

    def _retain_preempted(self) -> None:
        """Keep the rows of preempted sequences: at once, and when those of the step in flight have arrived."""
        if self._capture is not None:
            for preemption in self.scheduler.preemptions:
                self._capture.retain(preemption)

    def _retain_finally(self) -> None:
        """The same once no more rows will arrive, so that nothing is kept twice."""
        self._retain_preempted()
        self.scheduler.preemptions.clear()


def _ways(
    speculation: Speculation | None, scheduler: Scheduler, in_flight: Schedule | None, *, overlaps: bool
) -> tuple[bool, bool]:
    """Return whether the next step may have drafts, and whether it overlaps with the step in flight.

    An overlapped step has drafts only if the step in flight drafts and defers no samples. Otherwise a step without
    drafts comes first.
    """
    if speculation is None or not speculation.is_on:
        return False, overlaps
    if not (overlaps and speculation.overlaps) or wants_every_token(scheduler):
        return True, False
    return in_flight is None or (in_flight.plan.wants_drafts and not in_flight.plan.holds_samples), True


def _settled(
    schedule: Schedule | None,
    before: Schedule,
    result: StepResult,
    *,
    table: RowTable,
    capture: RoutingCapture | None,
) -> Schedule | None:
    """Return the step in flight, completed by `settled` if it has awaited chunks; `before` is committed."""
    if schedule is None or not awaits(schedule.plan):
        return schedule
    schedule = settled(table, schedule, before=before, result=result)
    if capture is not None:
        capture.submit(schedule.plan, table)
    return schedule


def _streams_routing(request: GenerationRequest) -> bool:
    return request.return_routed_experts and request.stream_routed_experts


def awaits(plan: StepPlan) -> bool:
    """Return True if some chunks of the plan have awaited start positions."""
    chunks = plan.chunks
    return chunks.ancestors is not None and bool((chunks.starts <= AWAITED).any())


def wants_every_token(scheduler: Scheduler) -> bool:
    """Return True if a running or next waiting sequence needs each token on the host before the next step.

    These are sequences with deferred sampling or a token probe.
    """
    table = scheduler.table
    if table.wants.num_held or table.wants.num_probed:
        return True
    max_num_next = CANDIDATES + sum(len(rank.free_rows) for rank in scheduler.open_ranks)
    return any(each.is_held or each.evidence.probe is not None for each in islice(scheduler.waiting, max_num_next))


def settled(table: RowTable, schedule: Schedule, *, before: Schedule, result: StepResult) -> Schedule:
    """Return the schedule with start positions and drafts filled in after the step `before` is committed.

    Its plan and the `num_computed` of `table`, which this updates, are as if the step had been planned after the
    commit. Samples of sequences that have left their rows do not count (`samples_that_count`).
    """
    chunks = schedule.plan.chunks
    (awaited,) = np.nonzero(chunks.starts <= AWAITED)
    rows, depths = chunks.rows[awaited], AWAITED - chunks.starts[awaited]
    starts, token_ids = chunks.starts.copy(), chunks.token_ids.copy()
    generations = np.full(len(table.generations), -1, np.int64)
    generations[schedule.sampling_rows] = schedule.sampling_generations
    is_there = table.generations[rows] == generations[rows]
    starts[awaited] = np.where(is_there, table.num_tokens[rows] - 1 + depths, 0)
    lengths = np.bincount(rows[is_there], minlength=len(generations))
    there = np.flatnonzero(lengths)
    table.num_computed[there] = table.num_tokens[there] - 1 + lengths[there]
    tokens = (np.cumsum(chunks.lengths) - 1)[awaited]
    is_draft = token_ids[tokens] == DRAFTED
    if is_draft.any():
        assert result.drafts is not None, "drafts were asked for"
        locations = np.zeros(len(generations), np.intp)
        drafted = before.sampling_rows
        of_drafted = drafted[np.concatenate([[True], drafted[1:] != drafted[:-1]])]
        locations[of_drafted] = np.arange(len(of_drafted))
        token_ids[tokens[is_draft]] = result.drafts[locations[rows[is_draft]], depths[is_draft] - 1]
    chunks = replace(chunks, starts=starts, token_ids=token_ids)
    return replace(schedule, plan=replace(schedule.plan, chunks=chunks))
