"""One turn of the engine: schedule, execute, commit, and routing where it is wanted."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from rayserve_moe.engine.executor import Executor
from rayserve_moe.engine.routing_capture import RoutingCapture
from rayserve_moe.requests import FinishReason, RoutedExperts
from rayserve_moe.scheduling.scheduler import Schedule, Scheduler
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult


@dataclass(frozen=True)
class Progress:
    """What a turn brought to one sequence: a sampled token (or none), and its routing where it ended."""

    sequence: Sequence
    token_id: int | None = None
    logprob: float = 0.0
    routing: RoutedExperts | None = None


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
    """Drives scheduler, executor and routing capture in step; knows nothing of clients."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, capture: RoutingCapture | None) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._capture = capture
        self._clock = StepClock()

    def run(self) -> list[Progress]:
        """Run one step; returns what it sampled and what it ended. Pages of ended sequences are free again."""
        started = time.perf_counter()
        schedule = self.scheduler.schedule()
        self._retain(schedule)
        submitted = time.perf_counter()
        result = self._executor.execute(schedule.plan)
        returned = time.perf_counter()
        if self._capture is not None:
            self._capture.absorb(result.routing)
            self._capture.submit(schedule)
        ended = self.scheduler.commit(schedule, result)
        progress = self._progress(schedule, result)
        progress += [Progress(s, routing=self._take_leave(s)) for s in ended]
        self._account(schedule, result, (started, submitted, returned, time.perf_counter()))
        return progress

    def end(self, sequence: Sequence, reason: FinishReason) -> Progress:
        """End a sequence between steps and free its pages."""
        self.scheduler.end(sequence, reason)
        return Progress(sequence, routing=self._take_leave(sequence))

    def statistics(self) -> dict[str, float]:
        """Totals of the step clock, by field name."""
        return {name: float(value) for name, value in asdict(self._clock).items()}

    def _take_leave(self, sequence: Sequence) -> RoutedExperts | None:
        """Collect the routing of an ended sequence where it is wanted, then free its pages."""
        routing = None
        if self._capture is not None and sequence.request.return_routed_experts:
            self._harvest()
            routing = self._capture.gather(sequence)
        self.scheduler.release(sequence)
        return routing

    def _retain(self, schedule: Schedule) -> None:
        if self._capture is None or not schedule.preemptions:
            return
        self._harvest()
        for preemption in schedule.preemptions:
            self._capture.retain(preemption)

    def _harvest(self) -> None:
        """Bring in the rows of the last step now, rather than with the next one."""
        if self._capture is not None and self._capture.is_pending:
            self._capture.absorb(self._executor.execute(self.scheduler.harvest_plan()).routing)

    def _progress(self, schedule: Schedule, result: StepResult) -> list[Progress]:
        rows = zip(schedule.sequences, result.token_ids, result.logprobs, result.finite, strict=True)
        return [
            Progress(sequence, int(token), float(logprob))
            for sequence, token, logprob, finite in rows
            if token >= 0 and finite
        ]

    def _account(self, schedule: Schedule, result: StepResult, moments: tuple[float, float, float, float]) -> None:
        started, submitted, returned, ended = moments
        clock = self._clock
        clock.steps += 1
        clock.tokens_computed += schedule.plan.num_tokens
        clock.tokens_sampled += int(schedule.plan.chunk_samples.sum())
        clock.schedule_s += submitted - started
        clock.pack_s += result.times.pack_s
        clock.device_s += result.times.device_s
        clock.transport_s += returned - submitted - result.times.pack_s - result.times.device_s
        clock.commit_s += ended - returned
