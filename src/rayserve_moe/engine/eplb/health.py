"""State of the planner as operators see it: whether it answers, when it last decided, and what went wrong."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

from rayserve_moe.balancing.planning import PlanFailure, RefusedPlanError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0


@dataclass(frozen=True)
class PlanProblem:
    """A plan that was refused, or a failure of the planner."""

    reason: str
    """`lost`, `late`, `failed`, `malformed`, `invalid` or `stale`."""
    detail: str
    """The error."""
    time: float
    """Time at which it happened, unix seconds."""


@dataclass(frozen=True)
class ActorView:
    """State of the planner."""

    alive: bool
    """True if it answers."""
    restarts: int
    """Number of times it was lost and found again."""
    refused: dict[str, int]
    """Number of refused plans, by reason."""
    plan_age_s: float | None = None
    """Seconds since it last decided: by a plan that was followed, or because none was worth its moves; None: never."""
    overdue_periods: float = 0.0
    """Steps since then, in multiples of the interval between plans. Steps in which no plan is due do not count: while
    experts move, and before enough tokens are counted. A healthy planner stays near 1."""
    waiting_s: float = 0.0
    """Seconds that the running call of the planner has taken; 0 without a call."""
    last_problem: PlanProblem | None = None
    """The last refusal or failure."""


class PlannerHealth:
    """Record of a planner: pauses after failures, restarts, refused plans by reason, and its last decision.

    Steps count those that the server has computed. The methods are called by the thread that calls the planner, `view`
    by any thread.
    """

    def __init__(self, *, interval: int) -> None:
        self.refused = Counter[str]()
        self.problems: dict[str, PlanProblem] = {}
        """The last problem by reason."""
        self._interval = interval
        self._is_reached, self._was_reached = False, False
        self._num_losses_made_up, self._is_lost = 0, False
        self._pause_s, self._resume_at = 0.0, 0.0
        self._decided_at: float | None = None
        self._due_since = 0
        self._called_at: float | None = None

    @property
    def rest_of_pause_s(self) -> float | None:
        """Return the seconds until the next retry, 0 if it is due; None while the planner answers."""
        return None if self._is_reached else max(0.0, self._resume_at - time.monotonic())

    def record_call(self) -> None:
        """Record the begin of a call."""
        self._called_at = time.monotonic()

    def record_answer(self) -> None:
        """Record an answer, which resets the pause."""
        if self._is_lost:
            self._num_losses_made_up += 1
            log.info("the expert planner answers again")
        self._is_reached, self._was_reached, self._is_lost, self._pause_s = True, True, False, 0.0
        self._called_at = None

    def record_failure(self, failure: PlanFailure) -> None:
        """Record a failure and begin the next pause, twice as long as the previous pause."""
        if failure.reason == "lost":
            self._is_lost = self._was_reached
        else:
            self.refused[failure.reason] += 1
            self._is_lost |= failure.reason == "late"
        self._is_reached, self._called_at = False, None
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
        self._resume_at = time.monotonic() + self._pause_s
        self._record_problem(failure.reason, str(failure))
        log.warning("the expert planner failed, retrying in %.1f s: %s", self._pause_s, failure)

    def record_refusal(self, error: RefusedPlanError) -> None:
        """Record a plan that is not followed."""
        self.refused[error.reason] += 1
        self._record_problem(error.reason, str(error))
        log.warning("rejected an expert plan (%s): %s", error.reason, error)

    def record_decision(self, step: int) -> None:
        """Record a plan that is followed, or that none is worth its moves."""
        self._decided_at = time.time()
        self._due_since = step

    def postpone(self, step: int) -> None:
        """Record that no plan can be due at this step."""
        self._due_since = step

    def view(self, *, step: int, is_running: bool) -> ActorView:
        """Return the state of the planner at a step; without a running thread it is not alive."""
        decided_at, called_at = self._decided_at, self._called_at
        return ActorView(
            alive=is_running and self._is_reached,
            restarts=self._num_losses_made_up,
            refused=dict(self.refused),
            plan_age_s=None if decided_at is None else max(0.0, time.time() - decided_at),
            overdue_periods=max(0, step - self._due_since) / self._interval,
            waiting_s=0.0 if called_at is None else time.monotonic() - called_at,
            last_problem=max(self.problems.copy().values(), key=lambda problem: problem.time, default=None),
        )

    def _record_problem(self, reason: str, detail: str) -> None:
        self.problems[reason] = PlanProblem(reason, detail, time.time())
