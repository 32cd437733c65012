"""A replica whose devices are a clock: scheduler, step cycle and page events are the product's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.costs import StepTimes, load_of
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.fleet.load_average import Load
from rayserve_moe.fleet.page_log import PageLog, PageMessage
from rayserve_moe.requests.fields import INT32_MAX
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.retention import Retention
from rayserve_moe.scheduling import sequence as sequences
from rayserve_moe.scheduling.page_events import PageEvents
from rayserve_moe.scheduling.scheduler import Scheduler, StepLimits, namespace_of, watch_pages
from rayserve_moe.scheduling.step_plan import CopyTimes, HostSizes, PageMoves, StartReport, StepPlan, StepResult

KEY = bytes(32)
ANSWER_ID = 7
MOST_EVENTS = 1 << 18


@dataclass
class Clock:
    """Seconds since the start of a simulation, as one replica has them."""

    now: float = 0.0


class SimulatedDevices:
    """An executor that answers with one token for all; waiting for a result moves the clock to when it is there."""

    def __init__(self, times: StepTimes, clock: Clock, *, rows_per_rank: int, host: HostMemory | None = None) -> None:
        self._times, self._clock, self._rows_per_rank = times, clock, rows_per_rank
        self._before: tuple[float, StepResult] | None = None
        self.host, self._restored_at = host, 0.0
        self._copied_at: dict[int, float] = {}
        """End time of the copies of each data rank, in seconds."""

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Begin a step when the one before has ended, and wait for that one."""
        before, self._before = self._before, None
        began = max(self._clock.now, self._restored_at, 0.0 if before is None else before[0])
        moved = 0 if plan.moves is None else self._copy(plan.moves)
        if plan.num_chunks:
            seconds = self._times.seconds(load_of(plan, rows_per_rank=self._rows_per_rank))
            page_s = 0.0 if self.host is None else self.host.page_s
            self._before = began + seconds, replace(_answer(plan), copied=CopyTimes(moved, moved * page_s))
        elif moved and before is None:
            self._clock.now = max(self._clock.now, self._restored_at)  # nothing else is there to do
        if before is None:
            return None
        self._clock.now = max(self._clock.now, before[0])
        return before[1]

    def _copy(self, moves: PageMoves) -> int:
        """Copy pages in order, beside the steps; the next step waits for restored ones. Return their number."""
        assert self.host is not None, "pages move without host memory"
        for copies, are_awaited in ((moves.offloads, False), (moves.restores, True)):
            for rank, *_ in copies.tolist():
                begins = max(self._copied_at.get(rank, 0.0), self._clock.now)
                self._copied_at[rank] = begins + self.host.page_s
                if are_awaited:
                    self._restored_at = max(self._restored_at, self._copied_at[rank])
        return len(moves.offloads) + len(moves.restores)

    def start(self) -> StartReport:
        """Do nothing."""
        raise NotImplementedError

    def release(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Do nothing."""


def _answer(plan: StepPlan) -> StepResult:
    count = int(np.count_nonzero(plan.chunks.samples))
    ids, ranks = np.full(count, ANSWER_ID, np.int32), np.ones(count, np.int32)
    return StepResult(plan.step_id, ids, np.zeros(count, np.float32), ranks)


class HostMemory(NamedTuple):
    """A cache of evicted pages in the memory of a replica's hosts."""

    num_pages: int
    """Number of pages of each data rank."""
    page_s: float
    """Seconds to copy a page in either direction. A data rank copies its pages one after the other."""


class SessionHints(NamedTuple):
    """Hints that clients send with the turns of a session."""

    names: bool = False
    """True if every turn names its session."""
    final: bool = False
    """True if the last turn ends the session."""
    ttl_s: float = 0.0
    """Requested seconds of protection for the pages of every turn."""


NO_HINTS = SessionHints()


class SimulatedReplica:
    """Takes prompts, and gives tokens when `step` says; events of its pages are there after every step."""

    def __init__(
        self, limits: StepLimits, times: StepTimes, *, hints: SessionHints = NO_HINTS, host: HostMemory | None = None
    ) -> None:
        self.clock = Clock()
        self.devices = SimulatedDevices(times, self.clock, rows_per_rank=limits.num_rows, host=host)
        scheduler, features = Scheduler(limits), []
        if host is not None:
            sizes = HostSizes(host.num_pages)
            features.append(HostedPages(scheduler, sizes, clock=lambda: self.clock.now))
        self.cycle = StepCycle(scheduler, self.devices, extensions=features)  # ty: ignore[invalid-argument-type]
        for rank in self.cycle.scheduler.ranks:
            rank.tree.clock = lambda: self.clock.now
        self._hints = hints
        self.is_awake = False
        self._events, self._watched = PageEvents(lambda: None), False
        self._log = PageLog(
            KEY, num_data_ranks=limits.num_data_ranks, num_pages=limits.num_pages, page_size=limits.page_size
        )

    def watch(self) -> Iterable[PageMessage]:
        """Record pages from now on; returns those that there are."""
        watch_pages(self.cycle.scheduler, self._events)
        self._watched = True
        self._log.publish(self._events.take(MOST_EVENTS))
        return self._log.snapshot()

    def page_events(self) -> PageMessage | None:
        """Return the changes since the last call."""
        changes = self._events.take(MOST_EVENTS) if self._watched else []
        return self._log.publish(changes) if changes else None

    def add(
        self, name: str, token_ids: np.ndarray, *, num_answer: int, session: str | None = None, is_last: bool = False
    ) -> sequences.Sequence:
        """Queue a prompt; a turn of a `session` carries the hints of the replica's clients."""
        hints = NO_HINTS if session is None else self._hints
        protected = ((INT32_MAX, hints.ttl_s),) if hints.ttl_s and not (is_last and hints.final) else ()
        request = GenerationRequest(
            name,
            token_ids,
            SamplingParams(max_new_tokens=num_answer, temperature=0.0),
            session=session if hints.names else None,
            retention=Retention(protected, ends_session=is_last and hints.final),
        )
        sequence = sequences.Sequence(request, 0, seed=0, stop_token_ids=frozenset())
        self.cycle.scheduler.add([sequence])
        return sequence

    def queued(self, token_ids: np.ndarray) -> sequences.Sequence:
        """Return a prompt that is not queued, to look for cached pages."""
        request = GenerationRequest("", token_ids, SamplingParams(max_new_tokens=1, temperature=0.0))
        sequence = sequences.Sequence(request, 0, seed=0, stop_token_ids=frozenset())
        sequence.cache.namespace = namespace_of(self.cycle.scheduler, request)
        return sequence

    def step(self, now: float) -> tuple[Sequence[sequences.Sequence], list[sequences.Sequence]]:
        """Plan a step, and commit the one before it; returns who got a token, and who has ended, at `clock.now`."""
        self.clock.now = max(self.clock.now, now)
        owners = list(self.cycle.scheduler.table.sequences)
        rows, ended = self.cycle.run()
        return [owner for row in rows.tolist() if (owner := owners[row]) is not None], ended

    def load(self) -> Load:
        """Return the load as `PageWatch.load` reports it."""
        scheduler = self.cycle.scheduler
        unfinished = [sequence for rank in scheduler.ranks for sequence in rank.prefilling]
        queued = sum(sequence.num_tokens for sequence in scheduler.waiting)
        queued += sum(max(0, sequence.num_tokens - sequence.num_computed) for sequence in unfinished)
        return Load(len(scheduler.waiting) + len(scheduler.running), queued)
