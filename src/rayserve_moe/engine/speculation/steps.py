"""Steps with drafts: when they overlap, and the measurements that speculation takes from them."""

from __future__ import annotations

import time

import numpy as np

from rayserve_moe.engine.cycle import Pace
from rayserve_moe.engine.extension import StepExtension
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult


class DraftedSteps(StepExtension):
    """Extension and pace of steps with speculation.

    With `overlaps` a step is submitted while the drafts of the previous step are still on the devices. This requires a
    draft model, and that no sequence needs its tokens on the host. Otherwise a step with drafts follows a committed
    step.
    """

    def __init__(self, speculation: Speculation, scheduler: Scheduler, *, overlaps: bool = True) -> None:
        self.speculation, self._scheduler = speculation, scheduler
        # A token at an unknown position may write an entry of a recurrent layer.
        self._overlaps = overlaps and not scheduler.ranks[0].entry_tokens
        self._started_at = 0.0
        self._drains = False
        """True if the step in flight and the next step have different modes. Then its time is not recorded."""
        self._committed_at: float | None = None
        """When the last step was committed, if work was left; None otherwise."""

    def next_step(self, in_flight: Schedule | None) -> Pace:
        """Return the pace of the next step."""
        self._started_at = time.perf_counter()
        drafts, overlaps = self._modes(in_flight)
        may_follow = in_flight is None or (overlaps if drafts else in_flight.plan.chunks.max_drafts == 0)
        self._drains = not may_follow
        if in_flight is None and overlaps:
            self._committed_at = None
        return Pace(self.speculation.draft if drafts else None, overlaps, drains=self._drains)

    def plan(self, schedule: Schedule, before: Schedule | None) -> Schedule:
        """Add the inputs of a draft model."""
        return self.speculation.with_drafting(schedule, before)

    def returned(self, schedule: Schedule, result: StepResult, *, counts: np.ndarray | None) -> None:
        """Count the accepted drafts of a step."""
        self.speculation.record_result(schedule, result, counts=counts)

    def committed(self, schedule: Schedule, num_tokens: int) -> None:
        """Record the seconds of a step: since the previous commit, or since its own start if nothing ran before."""
        if self._drains:
            return
        now = time.perf_counter()
        since = self._started_at if self._committed_at is None else self._committed_at
        self.speculation.record_time(schedule, num_tokens, seconds=now - since)
        self._committed_at = now if self._scheduler.has_work else None

    def released(self, sequence: Sequence) -> None:
        """Drop the drafts of an ended sequence."""
        self.speculation.end(sequence)

    def _modes(self, in_flight: Schedule | None) -> tuple[bool, bool]:
        """Return whether the next step may have drafts, and whether it overlaps with the step in flight.

        An overlapped step has drafts only if the step in flight drafts and defers no samples. Otherwise a step without
        drafts comes first.
        """
        speculation = self.speculation
        if not speculation.is_on:
            return False, self._overlaps
        if not (self._overlaps and speculation.overlaps) or needs_host_tokens(self._scheduler):
            return True, False
        return in_flight is None or (in_flight.plan.wants_drafts and not in_flight.plan.holds_samples), True


def needs_host_tokens(scheduler: Scheduler) -> bool:
    """Return True if a running or waiting sequence needs each token on the host before the next step.

    These are sequences with deferred sampling or a token probe. Any waiting sequence may be admitted next.
    """
    table = scheduler.table
    if table.wants.num_held or table.wants.num_probed:
        return True
    return any(each.is_held or each.evidence.probe is not None for each in scheduler.waiting)
