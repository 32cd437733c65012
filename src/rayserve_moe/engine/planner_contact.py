"""Being in touch with whoever plans placements: when to ask again after a failure, and what went wrong so far."""

from __future__ import annotations

import logging
import time
from collections import Counter

from rayserve_moe.balancing.proposal import PlanFailure
from rayserve_moe.balancing.view import ActorView

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class PlannerRetry:
    """Whether the planner may be asked now, how often it was lost and found again, and `refused` plans by reason."""

    def __init__(self) -> None:
        self.refused = Counter[str]()
        self._is_reached, self._was_reached = False, False
        self._num_losses_made_up, self._is_lost = 0, False
        self._pause_s, self._resume_at = 0.0, 0.0

    @property
    def rest_of_pause_s(self) -> float | None:
        """Seconds until it may be asked again, 0 where it may be now; None where nothing stands in the way."""
        return None if self._is_reached else max(0.0, self._resume_at - time.monotonic())

    def note_answer(self) -> None:
        """It has answered."""
        if self._is_lost:
            self._num_losses_made_up += 1
            log.info("experts are planned for again")
        self._is_reached, self._was_reached, self._is_lost, self._pause_s = True, True, False, 0.0

    def note_failure(self, failure: PlanFailure) -> None:
        """It has not; the next pause begins, twice as long as the one before."""
        if failure.reason == "lost":
            self._is_lost = self._was_reached
        else:
            self.refused[failure.reason] += 1
            self._is_lost |= failure.reason == "late"
        self._is_reached = False
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
        self._resume_at = time.monotonic() + self._pause_s
        log.warning("no plan of experts, next try in %.1f s: %s", self._pause_s, failure)

    def view(self, *, is_running: bool) -> ActorView:
        """What is shown of it; with nobody `is_running` to ask it, it counts as gone."""
        return ActorView(is_running and self._is_reached, self._num_losses_made_up, dict(self.refused))
