"""What becomes of requests, rows and experts when the hosts are lost that held them."""

from __future__ import annotations

from collections.abc import Callable

from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.engine.extension import ReplacedHosts, StepExtension
from rayserve_moe.engine.recovery.hosts import Recovery
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.scheduler import Scheduler, unfinished
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.starting_over import admit_all, give_up_step, hold_back_all_but, use_ranks
from rayserve_moe.scheduling.step_plan import StepPlan


class StepLosses(StepExtension):
    """Keeps what was committed and drops all else: then every sequence is as after a preemption.

    Tokens, log-probs, scores and rows of committed tokens stay with their sequences; keys, values and cached prefixes
    go, rows of new page allocations cannot be taken for old ones, and experts lie as at the start. Hosts that are done
    without take whole data ranks along. While sequences are on trial for a step that raised an error, they run alone.
    """

    def __init__(self, recovery: Recovery, scheduler: Scheduler) -> None:
        self._recovery, self._scheduler = recovery, scheduler

    @property
    def generation(self) -> int:
        """Which hosts these are: counts up when they are replaced."""
        return self._recovery.generation

    @property
    def trial_is_over(self) -> bool:
        return bool(self._scheduler.held) and self._recovery.blame.is_cleared

    def start_over(
        self,
        failure: ExecutorFailure,
        lost: list[StepPlan],
        *,
        retract: Callable[[], object],
        reset: Callable[[ReplacedHosts], object],
    ) -> tuple[tuple[Sequence, FinishReason], ...]:
        """Drop `lost` steps, the oldest first, `retract` all that runs, replace the hosts and `reset` all features.

        Returns the sequence to blame for it, if it is known, with the reason that ends it. Raises if hosts are not
        replaced.
        """
        scheduler, blame = self._scheduler, self._recovery.blame
        computed = dict.fromkeys(sequence for plan in lost for sequence in give_up_step(scheduler, plan))
        retract()
        admit_all(scheduler)
        scheduler.flush()
        counts = not blame.trial  # halving ends by itself
        culprit = blame.note_error(list(computed)) if failure.in_step else None
        self._recovery.rebuild(failure, num_carried=len(unfinished(scheduler)), counts=counts)
        layout = self._recovery.layout
        use_ranks(scheduler, layout.num_data_ranks)
        reset(ReplacedHosts(layout))
        hold_back_all_but(scheduler, blame.trial)
        if culprit is None:
            return ()
        return ((culprit, FinishReason("error", message=f"every step with this request fails: {failure}")),)

    def try_next(self, retract: Callable[[], object]) -> None:
        """After a trial: have the next suspects run alone, or all that waits where there are no more."""
        self._recovery.blame.move_on()
        retract()
        admit_all(self._scheduler)
        hold_back_all_but(self._scheduler, self._recovery.blame.trial)

    def committed(self, schedule: Schedule, num_tokens: int) -> None:
        """Record that the hosts work."""
        self._recovery.num_since_commit = 0
