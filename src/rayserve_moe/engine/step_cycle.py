"""One turn of the engine: plan a step, hand it over, take over the result of the one before."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np

from rayserve_moe.engine.eplb_steps import EplbSteps
from rayserve_moe.engine.executor import Executor
from rayserve_moe.engine.expert_counting import ExpertCounting
from rayserve_moe.engine.routing_capture import RoutingCapture
from rayserve_moe.requests import FinishReason, GenerationRequest, RoutedExperts
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult
from rayserve_moe.scheduling.weight_change import change_weights, preempt_all


@dataclass(frozen=True)
class Ending:
    """A sequence that has ended, all of its tokens known, and its routing where that is wanted.

    Where routing is streamed these are the rows that its client does not have yet.
    """

    sequence: Sequence
    routing: RoutedExperts | None = None


@dataclass(frozen=True)
class Turn:
    """What a turn brought: the rows that got a token, int [N], and the sequences that have ended."""

    rows: np.ndarray
    endings: list[Ending]


_NOTHING = Turn(np.zeros(0, np.int64), [])


@dataclass
class StepClock:
    """Where the seconds of all steps so far went, and how much they computed."""

    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    schedule_s: float = 0.0
    pack_s: float = 0.0
    transport_s: float = 0.0
    device_s: float = 0.0
    commit_s: float = 0.0


class StepCycle:
    """Drives scheduler, executor and routing capture in step; knows nothing of clients.

    With `overlaps` the devices run a step while the host takes over the one before it and plans the next. With
    `eplb` steps take pieces of a migration along, without it `counting` has experts counted. While `is_paused`
    no step is planned. `tally` adds up those of all steps, where they bring any.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        capture: RoutingCapture | None,
        overlaps: bool = True,
        eplb: EplbSteps | None = None,
        counting: ExpertCounting | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.eplb = eplb
        self._experts = eplb or counting
        self.is_paused = False
        self._executor = executor
        self._capture = capture
        self._overlaps = overlaps
        self._in_flight: Schedule | None = None
        self._clock = StepClock()
        self.tally: np.ndarray | None = None

    @property
    def has_work(self) -> bool:
        return (self.scheduler.has_work and not self.is_paused) or self._in_flight is not None

    def run(self) -> Turn:
        """Plan and submit a step, and commit the one before; pages of ended sequences are free again."""
        started = time.perf_counter()
        schedule = self.scheduler.schedule(captures_all=self._captures_all)
        if self._experts is not None:
            schedule = self._experts.attach(schedule)
        self._retain_preempted()
        if self._capture is not None:
            self._capture.submit(schedule.plan, self.scheduler.table)
        self._clock.schedule_s += time.perf_counter() - started
        turn = self._exchange(schedule)
        if self._in_flight is not None and not self._overlaps:
            turn = _joined(turn, self._exchange(None))
        return turn

    def drain(self) -> Turn:
        """Commit the step that is in flight, if there is one, and plan none: then nothing runs."""
        return self._exchange(None) if self._in_flight is not None else _NOTHING

    def retract(self) -> None:
        """Have everything that runs wait, without its pages. Call after `drain`."""
        preempt_all(self.scheduler)
        self._retain_finally()

    def take_staged_weights(self, weight_version: str) -> None:
        """Go on under the weights that every host has staged. Call after `drain`."""
        assert self._in_flight is None, "a step is under way"
        self._executor.execute(replace(self.scheduler.empty_plan(), takes_staged_weights=True))
        change_weights(self.scheduler, weight_version)
        self._retain_finally()
        if self._capture is not None:
            self._capture.set_weight_version(weight_version)
        if self._experts is not None:
            self._experts.change_weights()

    def streamed_routing(self, sequence: Sequence) -> RoutedExperts | None:
        """The rows of a running sequence that its client does not have yet; None where they are not streamed."""
        if self._capture is None or not _streams_routing(sequence.request):
            return None
        return self._gather(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> Ending:
        """End a sequence between steps and free its pages."""
        self.scheduler.end(sequence, reason)
        return self._take_leave(sequence)

    def statistics(self) -> dict[str, float]:
        """Totals of the step clock, by field name."""
        return {name: float(value) for name, value in asdict(self._clock).items()}

    @property
    def _captures_all(self) -> bool:
        """A cached prefix brings the routing of whoever computed it: then every row has to be there."""
        return self._capture is not None and self.scheduler.caches_prefixes

    def _exchange(self, schedule: Schedule | None) -> Turn:
        """Submit a step, or none, and commit the one that is in flight."""
        submitted = time.perf_counter()
        plan = schedule.plan if schedule is not None else self.scheduler.empty_plan()
        result = self._executor.execute(plan)
        returned = time.perf_counter()
        finished, self._in_flight = self._in_flight, schedule if plan.num_chunks else None
        self._clock.transport_s += returned - submitted
        if result is not None and self._capture is not None:
            self._capture.absorb(result.routing)
        self._retain_finally()
        if finished is None:
            return _NOTHING
        assert result is not None and result.step_id == finished.plan.step_id, "a result is not that of its step"
        if self._experts is not None:
            self._experts.absorb(result)
        commit = self.scheduler.commit(finished, result)
        endings = [self._take_leave(sequence) for sequence in commit.ended]
        self._account(finished, result, time.perf_counter() - returned)
        return Turn(commit.rows, endings)

    def _take_leave(self, sequence: Sequence) -> Ending:
        """Collect the routing of an ended sequence where it is wanted, then free its pages."""
        routing = None
        self._retain_preempted()
        if self._capture is not None and sequence.request.return_routed_experts:
            routing = self._gather(sequence)
        self.scheduler.release(sequence)
        return Ending(sequence, routing)

    def _gather(self, sequence: Sequence) -> RoutedExperts:
        """Rows that its client does not have yet; where they are streamed, it counts as having them from now on."""
        assert self._capture is not None, "without capture there are no rows"
        routing = self._capture.gather(sequence, start=sequence.num_published_rows)
        if _streams_routing(sequence.request):
            sequence.num_published_rows += len(routing.rows)
        return routing

    def _retain_preempted(self) -> None:
        """Keep the rows of what was preempted: at once, and once more when those of the step in flight have come.

        By then its pages may have other owners, but not yet other rows.
        """
        if self._capture is not None:
            for preemption in self.scheduler.preemptions:
                self._capture.retain(preemption)

    def _retain_finally(self) -> None:
        """The same once no rows are to come: nothing is kept twice."""
        self._retain_preempted()
        self.scheduler.preemptions.clear()

    def _account(self, finished: Schedule, result: StepResult, commit_s: float) -> None:
        clock = self._clock
        clock.steps += 1
        clock.tokens_computed += finished.plan.num_tokens
        clock.tokens_sampled += len(finished.sampling_rows)
        clock.pack_s += result.times.pack_s
        clock.device_s += result.times.device_s
        clock.transport_s -= result.times.pack_s + result.times.device_s
        clock.commit_s += commit_s
        if result.tally is not None:
            self.tally = result.tally if self.tally is None else self.tally + result.tally


def _streams_routing(request: GenerationRequest) -> bool:
    return request.return_routed_experts and request.stream_routed_experts


def _joined(*turns: Turn) -> Turn:
    endings: Iterable[Ending] = (ending for turn in turns for ending in turn.endings)
    return Turn(np.concatenate([turn.rows for turn in turns]), list(endings))
