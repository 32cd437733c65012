"""The engine's step cycle: plan a step, submit it, commit the result of the previous step."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import asdict, replace
from typing import NamedTuple, Protocol

import numpy as np

from rayserve_moe.engine.executor import Executor, ExecutorFailure
from rayserve_moe.engine.extension import (
    NewWeights,
    RenamedWeights,
    ReplacedHosts,
    Reset,
    StepExtension,
    hooks,
)
from rayserve_moe.engine.step_clock import StepClock, scheduler_statistics
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.plan_builder import Ending, Schedule, empty_schedule
from rayserve_moe.scheduling.scheduler import Commit, Scheduler, change_weights, rename_weights
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepPlan
from rayserve_moe.scheduling.verify_rows import Draft, resolve_awaited, samples_that_count

NO_ROWS = np.zeros(0, np.int64)


class StepCycle:
    """Step cycle over scheduler and executor, without clients; features take part through `StepExtension` hooks.

    With an overlapping `pace`, devices run a step while the host commits the previous step and plans the next. No step
    is planned while `is_paused`. `losses` replaces lost hosts; without it, ExecutorFailure propagates.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        extensions: Several[StepExtension] = (),
        pacing: Pacing | None = None,
        losses: Losses | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.losses = losses or NoReplacement()
        self.is_paused = False
        self._executor = executor
        self.extensions = tuple(extensions)
        self._pacing = pacing or SteadyPace()
        self._plan, self._submitted = hooks(extensions, "plan"), hooks(extensions, "submitted")
        self._returned, self._committed = hooks(extensions, "returned"), hooks(extensions, "committed")
        self._released = hooks(extensions, "released")
        self._in_flight: Schedule | None = None
        self._clock = StepClock()

    @property
    def has_work(self) -> bool:
        return (self.scheduler.has_work and not self.is_paused) or self._in_flight is not None

    def run(self) -> Commit:
        """Plan and submit a step, and commit the previous step.

        Returns: as `Scheduler.commit`; ended sequences are released.
        """
        if self.losses.trial_is_over:
            if self._in_flight is not None:
                return self.drain()
            self.losses.try_next(self.retract)
        started = time.perf_counter()
        pace = self._pacing.next_step(self._in_flight)
        if pace.drains:
            return self.drain()
        schedule = self._completed(self.scheduler.schedule(draft=pace.draft))
        if not schedule.is_awaited:
            self._record(schedule)
        self._clock.schedule_s += time.perf_counter() - started
        committed = self._exchange(schedule)
        return committed if pace.overlaps or self._in_flight is None else self.drain()

    def drain(self) -> Commit:
        """Commit the step in flight, if any, without planning another; afterwards nothing runs."""
        if self._in_flight is None:
            return NO_ROWS, []
        return self._exchange(self._completed(empty_schedule(self.scheduler.empty_plan())))

    def carry(self) -> Commit:
        """Submit a plan without chunks, for copies of pages. Call while no step is in flight."""
        return self._exchange(self._completed(empty_schedule(self.scheduler.empty_plan())))

    def retract(self) -> None:
        """Preempt all running sequences; they wait in their former order. Call after `drain`."""
        for sequence in reversed(self.scheduler.running):
            self.scheduler.preempt(sequence)

    def on_executor_failure(self, failure: ExecutorFailure, schedule: Schedule | None = None) -> Commit:
        """Drop submitted steps and `schedule`, and replace all hosts.

        Returns: the commit of sequences that caused the failure.

        Raises: ExecutorFailure if hosts are not replaced.
        """
        lost, self._in_flight = (self._in_flight, schedule), None
        plans = [each.plan for each in lost if each]
        blamed = self.losses.recover(failure, plans, retract=self.retract, reset=self._reset)
        return NO_ROWS, [self.end(*each) for each in blamed]

    def take_staged_weights(self, weight_version: str, *, are_sent: bool = False) -> bool:
        """Switch to staged weights; return False if a host was lost meanwhile. Call after `drain`.

        `are_sent` is True for weights from a trainer, False for a checkpoint.
        """
        assert self._in_flight is None, "a step is in flight"
        try:
            self._executor.execute(replace(self.scheduler.empty_plan(), takes_staged_weights=True))
        except ExecutorFailure as failure:
            self.on_executor_failure(failure)
            return False
        change_weights(self.scheduler, weight_version)
        self._reset(NewWeights(weight_version, are_sent))
        return True

    def rename_weights(self, weight_version: str) -> None:
        """Change the version of the current weights. Call after `drain`."""
        rename_weights(self.scheduler, weight_version)
        self._reset(RenamedWeights(weight_version))

    def end(self, sequence: Sequence, reason: FinishReason) -> Sequence:
        """End a sequence between steps, free its pages, and return it."""
        self.scheduler.end(sequence, reason)
        return self._release(sequence)

    def statistics(self) -> dict[str, float]:
        """Return pages, running sequences, and totals of the step clock and of extensions, by field name."""
        found = scheduler_statistics(self.scheduler) | {"paused": float(self.is_paused)}
        found |= {name: float(value) for name, value in asdict(self._clock).items()}
        for each in self.extensions:
            found |= each.statistics()
        return found

    def _completed(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the additions of extensions."""
        for plan in self._plan:
            schedule = plan(schedule, self._in_flight)
        return schedule

    def _record(self, schedule: Schedule) -> None:
        """Call the `submitted` hooks for a step whose start positions are known."""
        for submitted in self._submitted:
            submitted(schedule)

    def _exchange(self, schedule: Schedule) -> Commit:
        """Submit a step and commit the step in flight."""
        failed = [self.end(*each) for each in schedule.endings]
        submitted = time.perf_counter()
        try:
            result = self._executor.execute(schedule.plan)
        except ExecutorFailure as failure:
            rows, ended = self.on_executor_failure(failure, schedule)
            return rows, [*failed, *ended]
        returned = time.perf_counter()
        self._clock.transport_s += returned - submitted
        finished, self._in_flight = self._in_flight, schedule if schedule.plan.num_chunks else None
        if finished is None:
            return NO_ROWS, failed
        assert result is not None and result.step_id == finished.plan.step_id, "a result belongs to another step"
        counts = None  # all samples become tokens
        if finished.verifies:
            counts = samples_that_count(self.scheduler.table, finished, result=result)
        for take_over in self._returned:
            take_over(finished, result, counts=counts)
        rows, ended = self.scheduler.commit(finished, result, counts=counts)
        for sequence in ended:
            self._release(sequence)
        if schedule.is_awaited:
            self._in_flight = resolve_awaited(self.scheduler.table, schedule, before=finished, result=result)
            self._record(self._in_flight)
        self._clock.record(finished, result, num_sampled=len(rows), commit_s=time.perf_counter() - returned)
        for committed in self._committed:
            committed(finished, len(rows))
        return rows, [*ended, *failed]

    def _release(self, sequence: Sequence) -> Sequence:
        """Call the `released` hooks for an ended sequence, then free its pages."""
        for released in self._released:
            released(sequence)
        self.scheduler.release(sequence)
        return sequence

    def _reset(self, cause: Reset) -> None:
        for each in self.extensions:
            each.reset(cause)


class Pace(NamedTuple):
    """Pace of the next step."""

    draft: Draft | None = None
    """Proposes drafts for the step; None for a step without drafts."""
    overlaps: bool = True
    """True if the step is submitted before the step in flight is committed."""
    drains: bool = False
    """True if the step in flight is committed instead, and no step is planned."""


class SteadyPace:
    """Constant pace of steps without drafts."""

    def __init__(self, *, overlaps: bool = True) -> None:
        self._pace = Pace(overlaps=overlaps)

    def next_step(self, in_flight: Schedule | None) -> Pace:
        """Return the pace of the next step."""
        return self._pace


class Pacing(Protocol):
    """Policy that decides when steps overlap (`SteadyPace`, `DraftedSteps`)."""

    def next_step(self, in_flight: Schedule | None) -> Pace:
        """Return the pace of the step that is planned now."""
        ...


class Losses(Protocol):
    """Replacement of lost hosts (`StepLosses`)."""

    @property
    def generation(self) -> int:
        """Return the number of times that hosts were replaced."""
        ...

    @property
    def trial_is_over(self) -> bool:
        """Return True if all sequences on trial have ended or passed the position of the error."""
        ...

    def try_next(self, retract: Callable[[], object]) -> None:
        """Start a trial of the next suspects, or admit all waiting sequences if no suspects are left."""
        ...

    def recover(
        self,
        failure: ExecutorFailure,
        lost: list[StepPlan],
        *,
        retract: Callable[[], object],
        reset: Callable[[ReplacedHosts], object],
    ) -> tuple[Ending, ...]:
        """Drop the `lost` steps (oldest first), call `retract`, replace the hosts, and call `reset`.

        Returns the sequences that caused the failure, if known. Raises: ExecutorFailure if hosts are not replaced.
        """
        ...


class NoReplacement:
    """Losses of an executor without host replacement: every failure propagates."""

    generation, trial_is_over = 0, False

    def try_next(self, retract: Callable[[], object]) -> None:
        """Do nothing: no trial exists."""

    def recover(self, failure: ExecutorFailure, lost: list[StepPlan], **_: object) -> tuple[Ending, ...]:
        """Raise the failure."""
        raise failure
