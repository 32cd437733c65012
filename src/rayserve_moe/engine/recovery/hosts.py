"""Replacement of lost hosts, and the search for a sequence that makes steps fail."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rayserve_moe.engine.executor import ExecutorFailure, GroupLayout
from rayserve_moe.engine.extension import ReplacedHosts, StepExtension
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.plan_builder import Ending, Schedule
from rayserve_moe.scheduling.recovery import admit_all, give_up_step, hold_back_all_but, use_ranks
from rayserve_moe.scheduling.scheduler import Scheduler, unfinished
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepPlan

log = logging.getLogger(__name__)

SHORT_S, LONG_S = 600.0, 3600.0
"""Windows in which rebuilds are counted: 10 minutes and an hour."""
WAITS_S = (0.0, 1.0, 5.0)
"""Seconds before a rebuild, indexed by the number of rebuilds since the last committed token."""


class Rebuilder(Protocol):
    """Executor whose hosts can be replaced."""

    on_loss: Callable[[], object]
    """Called, from any thread, if the executor notices a loss itself, or could have more hosts than it has."""

    @property
    def layout(self) -> GroupLayout:
        """Return the layout of the current hosts."""
        ...

    @property
    def phase(self) -> str:
        """Return the current phase of a rebuild."""
        ...

    @property
    def loss(self) -> ExecutorFailure | None:
        """Return the loss that caused `on_loss`, or None."""
        ...

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """Return the seconds of all rebuilds, by phase."""
        ...

    def rebuild(self) -> None:
        """End all hosts and start others with the same number of pages and the latest weights; `layout` may change.

        Raises: ExecutorFailure if that fails; it may be called again.
        """
        ...

    def cancel(self) -> None:
        """Make a rebuild that runs in another thread, and all later rebuilds, fail soon."""
        ...


class RebuildProgress(NamedTuple):
    """Phase of a rebuild, and the seconds since the loss."""

    phase: str
    seconds: float


@dataclass(frozen=True)
class RebuildBounds:
    """Maximum numbers of rebuilds within 10 minutes and within an hour; beyond either the engine fails."""

    max_in_10_minutes: int = 3
    max_in_hour: int = 10

    def allow(self, begun: deque[float], *, now: float) -> bool:
        """Return True if another rebuild may begin `now`, given the start times `begun` (seconds of the same clock)."""
        recent = sum(1 for at in begun if now - at < SHORT_S)
        return recent < self.max_in_10_minutes and sum(1 for at in begun if now - at < LONG_S) < self.max_in_hour


class Recovery:
    """Host replacement in the engine thread. `generation` counts the groups of hosts.

    Step results of a generation are invalid in the next. `progress`, `ended_at` and the counts may be read from any
    thread.
    """

    def __init__(self, rebuilder: Rebuilder, bounds: RebuildBounds) -> None:
        self.blame = Blame()
        self.generation = 0
        self.num_rebuilds = self.num_carried = 0
        self.ended_at = 0.0
        self.num_since_commit = 0
        self._rebuilder, self._bounds = rebuilder, bounds
        self._begun: deque[float] = deque(maxlen=10_000)
        self._lost_at: float | None = None
        self._is_stopped = threading.Event()

    @property
    def progress(self) -> RebuildProgress | None:
        """Return the progress of the running rebuild, or None."""
        lost_at = self._lost_at
        return None if lost_at is None else RebuildProgress(self._rebuilder.phase, time.monotonic() - lost_at)

    def statistics(self) -> dict[str, float]:
        """Return the number of rebuilds, of choices that survived them, total seconds, and missing hosts."""
        carried, seconds = float(self.num_carried), sum(self._rebuilder.phase_seconds.values())
        return {
            "rebuilds": float(self.num_rebuilds),
            "requests_carried_over": carried,
            "rebuild_s": seconds,
            "hosts_missing": float(self.layout.num_missing_hosts),
        }

    @property
    def layout(self) -> GroupLayout:
        """Return the layout of the current hosts."""
        return self._rebuilder.layout

    @property
    def loss(self) -> ExecutorFailure | None:
        """Return the loss that the executor has noticed itself, or None."""
        return self._rebuilder.loss

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """Return the seconds of all rebuilds, by phase."""
        return self._rebuilder.phase_seconds

    def rebuild(self, failure: ExecutorFailure, *, num_carried: int, counts: bool = True) -> None:
        """Replace all hosts after a failure. If not `counts`, the first rebuild does not count towards the bounds.

        Raises: ExecutorFailure if the bounds are reached, after `stop`, or after two final failures in a row.
        """
        self._lost_at, counts = time.monotonic(), counts and failure.is_loss
        log.error("replacing the hosts while %d choices wait: %s", num_carried, failure)
        try:
            while True:
                self._await_turn(failure, counts=counts)
                counts = True
                try:
                    self._rebuilder.rebuild()
                    break
                except ExecutorFailure as another:
                    log.exception("a rebuild has failed")
                    if another.is_final and failure.is_final:
                        raise
                    failure = another
            self.num_rebuilds += 1
            self.num_carried += num_carried
            log.warning("hosts are replaced after %.1f s", time.monotonic() - self._lost_at)
        finally:
            self._lost_at, self.ended_at = None, time.monotonic()

    def stop(self) -> None:
        """Begin no further rebuild, and cancel the running rebuild."""
        self._is_stopped.set()
        self._rebuilder.cancel()

    def _await_turn(self, failure: ExecutorFailure, *, counts: bool) -> None:
        """Begin a generation after the due wait.

        Raises: ExecutorFailure if no further rebuild may begin.
        """
        now = time.monotonic()
        if counts and not self._bounds.allow(self._begun, now=now):
            raise ExecutorFailure(f"{failure} ({len(self._begun)} rebuilds have not helped)") from failure
        if counts:
            self._begun.append(now)
        wait_s = WAITS_S[min(self.num_since_commit, len(WAITS_S) - 1)]
        self.num_since_commit += 1
        self.generation += 1
        if self._is_stopped.wait(wait_s):
            raise failure


def progress_of(recovery: Recovery | None) -> RebuildProgress | None:
    """Return the progress of the running rebuild, or None without one."""
    return None if recovery is None else recovery.progress


def step_start(started_at: float | None, recovery: Recovery | None) -> float | None:
    """Return the start of the running step, or the end of the last rebuild if later; None if neither applies."""
    if started_at is None or recovery is None:
        return started_at
    return None if recovery.progress is not None else max(started_at, recovery.ended_at)


TOKENS_IN_FLIGHT = 2
"""Maximum number of tokens between the last committed token of a sequence and a failing step with it."""


class Blame:
    """Search for the sequence that makes steps fail.

    A sequence is suspected if two steps with it raise an error and it receives no token between them. A single suspect
    is the culprit. Several suspects are bisected: during a `trial` only its sequences may run, and they are cleared
    once each has passed the position of the error. A lost host blames no sequence.
    """

    def __init__(self) -> None:
        self.trial: list[Sequence] = []
        self._rest: list[Sequence] = []
        self._tokens_at_error: dict[Sequence, int] = {}

    def record_error(self, computed: Several[Sequence]) -> Sequence | None:
        """Record an error of a step that `computed` these sequences; return the culprit once it is known."""
        suspects = [each for each in computed if self._tokens_at_error.get(each) == each.num_tokens]
        self._tokens_at_error = {each: each.num_tokens for each in computed}
        self._try(suspects if len(suspects) > 1 else [])
        return suspects[0] if len(suspects) == 1 else None

    @property
    def is_cleared(self) -> bool:
        """Return True if every sequence of the trial has ended or passed the error."""
        return all(
            each.finish is not None or each.num_tokens >= self._tokens_at_error[each] + TOKENS_IN_FLIGHT
            for each in self.trial
        )

    def move_on(self) -> None:
        """Begin the next trial with the remaining suspects, after a cleared one; end the search without any."""
        rest = [each for each in self._rest if each.finish is None]
        self._try(rest)

    def _try(self, suspects: list[Sequence]) -> None:
        half = (len(suspects) + 1) // 2
        self.trial, self._rest = suspects[:half], suspects[half:]


class StepLosses(StepExtension):
    """Recovery of the step cycle: committed results stay, all else is dropped and recomputed.

    Tokens, log-probs, scores and routing rows of committed tokens stay with their sequences. Keys, values and cached
    prefixes are dropped, and experts return to their initial placement. A group that continues with fewer hosts has
    fewer data ranks. Sequences on trial for a step that raised an error run alone.
    """

    def __init__(self, recovery: Recovery, scheduler: Scheduler) -> None:
        self._recovery, self._scheduler = recovery, scheduler

    @property
    def generation(self) -> int:
        """Return the number of times that hosts were replaced."""
        return self._recovery.generation

    @property
    def trial_is_over(self) -> bool:
        return bool(self._scheduler.held) and self._recovery.blame.is_cleared

    def recover(
        self,
        failure: ExecutorFailure,
        lost: list[StepPlan],
        *,
        retract: Callable[[], object],
        reset: Callable[[ReplacedHosts], object],
    ) -> tuple[Ending, ...]:
        """Drop the `lost` steps (oldest first), call `retract`, replace the hosts, and call `reset`.

        Returns the sequence that caused the failure, if known, with its finish reason. Raises: ExecutorFailure if hosts
        are not replaced.
        """
        scheduler, blame = self._scheduler, self._recovery.blame
        computed = dict.fromkeys(sequence for plan in lost for sequence in give_up_step(scheduler, plan))
        retract()
        admit_all(scheduler)
        scheduler.flush()
        counts = not blame.trial  # a bisection ends by itself
        culprit = blame.record_error(list(computed)) if failure.in_step else None
        self._recovery.rebuild(failure, num_carried=len(unfinished(scheduler)), counts=counts)
        layout = self._recovery.layout
        use_ranks(scheduler, layout.num_data_ranks)
        reset(ReplacedHosts(layout))
        hold_back_all_but(scheduler, blame.trial)
        if culprit is None:
            return ()
        return ((culprit, FinishReason("error", message=f"every step with this request fails: {failure}")),)

    def try_next(self, retract: Callable[[], object]) -> None:
        """Start a trial of the next suspects, or admit all waiting sequences if no suspects are left."""
        self._recovery.blame.move_on()
        retract()
        admit_all(self._scheduler)
        hold_back_all_but(self._scheduler, self._recovery.blame.trial)

    def committed(self, schedule: Schedule, num_tokens: int) -> None:
        """Reset the wait before rebuilds: the hosts work."""
        self._recovery.num_since_commit = 0
