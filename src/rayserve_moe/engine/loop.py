"""Engine thread: runs commands of clients, then steps, and dispatches outputs."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Several
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from rayserve_moe.balancing.planning import LocalPlanner, Planner, PlanningConfig, planning_config
from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.config.derive import max_live_requests, prefill_chunk_tokens, verify_rows
from rayserve_moe.config.settings import ClusterSettings, Settings, SpeculationSettings
from rayserve_moe.constraints.compiler import ConstraintCompiler
from rayserve_moe.engine.adapters import AdapterTable
from rayserve_moe.engine.admission import Capacity, check_request, sequences_of
from rayserve_moe.engine.command_queue import CommandQueue, EngineStoppedError
from rayserve_moe.engine.control import ABORTED, EngineControl, keyed, replace_lost
from rayserve_moe.engine.cycle import SteadyPace, StepCycle
from rayserve_moe.engine.eplb.control import EplbControl
from rayserve_moe.engine.eplb.steps import EplbSteps, eplb_steps_for
from rayserve_moe.engine.executor import Executor, ExecutorFailure
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.guides import DeferredSampling, guides_of
from rayserve_moe.engine.host_pages import HostedPages, hosted_pages_for
from rayserve_moe.engine.output_dispatch import OutputDispatch, Sink, no_routing
from rayserve_moe.engine.recovery.hosts import RebuildBounds, Rebuilder, Recovery, StepLosses, step_start
from rayserve_moe.engine.routing.capture import RoutingCapture
from rayserve_moe.engine.speculation.model_drafts import proposer_for
from rayserve_moe.engine.speculation.policy import DraftTotals, Speculation
from rayserve_moe.engine.speculation.step_times import ExpertReach
from rayserve_moe.engine.speculation.steps import DraftedSteps
from rayserve_moe.engine.step_clock import SelectionTally
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RequestError
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.scheduler import Scheduler, StepLimits
from rayserve_moe.scheduling.sequence import Guide, Sequence, restore
from rayserve_moe.scheduling.step_plan import StartReport

log = logging.getLogger(__name__)
Outputs = Collection[ChoiceResult]
_PART = re.compile(r"([_-]\d+)?")


class EngineLoop:
    """Owner of the engine thread. All public methods may be called from any thread.

    Commands take effect between steps. After a failure all requests end with an error and no more are accepted. With a
    `rebuilder`, which replaces the hosts of the executor, requests survive lost hosts.
    """

    def __init__(
        self,
        executor: Executor,
        card: ModelCard,
        *,
        settings: Settings,
        planner_for: Callable[[PlanningConfig], Planner] = LocalPlanner,
        constraints: ConstraintCompiler | None = None,
        rebuilder: Rebuilder | None = None,
    ) -> None:
        self._executor, self._settings = executor, settings
        self.constraints = constraints
        """Compiles the constraints of requests; closed with the loop."""
        self.recovery = None if rebuilder is None else _recovery_for(rebuilder, settings.cluster)
        """Replaces lost hosts; None without a rebuilder."""
        self._commands, self._state = CommandQueue(), _ThreadState()
        self.has_failed: Future[bool] = Future()
        """Done once all requests have ended; True if the thread ended by a failure."""
        self.start_report = executor.start()
        _log_start(self.start_report)
        self.eplb = eplb_steps_for(
            card.routing, self.start_report, settings=settings.balancing, parallel=settings.parallel
        )
        scheduler = scheduler_for(settings, card, started=self.start_report)
        capture = capture_for(scheduler, card, num_pages=self.start_report.num_pages) if card.returns_routing else None
        self._cycle = cycle_with(
            scheduler,
            executor,
            eplb=self.eplb,
            speculation=speculation_for(settings.speculation, scheduler, card=card),
            capture=capture,
            losses=None if self.recovery is None else StepLosses(self.recovery, scheduler),
            adapters=_adapters_for(settings.adapters, scheduler, keys_in_use=lambda: self._outputs.adapters),
            hosted=hosted_pages_for(scheduler, self.start_report, rows=capture),
            overlaps=settings.scheduler.overlap_steps,
        )
        self._outputs = OutputDispatch(
            scheduler.table,
            streamed_routing=no_routing if capture is None else capture.streamed,
            end=self._cycle.end,
        )
        self.request_metrics = self._outputs.metrics
        max_live = max_live_requests(settings.scheduler, num_data_ranks=settings.parallel.data_parallel_size)
        self.capacity = Capacity(self._outputs, max_live, self.recovery)
        self.control = EngineControl(
            self._cycle, executor, eplb=self.eplb, outputs=self._outputs, commands=self._commands, card=card
        )
        """Pauses the engine and changes its weights."""
        planning = planning_config(settings.balancing, settings.experts)
        self.eplb_control = EplbControl(
            self.eplb,
            planner_for(planning) if self.eplb.moves_experts else None,
            config=planning,
            layer_ids=card.routing.layer_ids,
        )
        """Sends readings to the planner that `planner_for` returns, if experts move."""
        if rebuilder is not None and self.recovery is not None:
            rebuilder.on_loss = partial(self._commands.post, partial(replace_lost, self.control, self.recovery))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def card(self) -> ModelCard:
        """Return the description of the current model."""
        return self.control.card

    def submit(self, request: GenerationRequest, sink: Sink, *, committed: Outputs = ()) -> list[Sequence]:
        """Queue a request and return its choices, for `abort`.

        `sink` receives the outputs after the `committed` outputs, in the engine thread, and must not block. A request
        id may be reused once its request has ended. A request with `committed` outputs is never rejected for capacity:
        it has been checked before it was taken over, or it has just left its place here.

        Raises: RequestError if the request cannot be served (UnknownAdapterError for its adapter), EngineStoppedError;
            for a new request also EngineBusyError if too many are live, and EngineRebuildingError.
        """
        max_tokens = (self.start_report.num_pages - 1) * self._settings.cache.page_size  # page 0 holds padding
        check_request(request, self.card, max_tokens=max_tokens)
        guides: Several[Guide | None] = [None] * request.sampling.n
        if request.is_guided or request.wants_evidence or request.sampling.processor_arguments:
            guides = guides_of(request, self.constraints, num_ids=self.card.vocab_size)
        with self._commands.lock:
            self._commands.check_open()
            if not committed:
                self.capacity.check()
            request = keyed(self.control, request)
            if request.request_id in self._outputs:
                raise RequestError("a request with this id is running", "rid")
            sequences = sequences_of(request, self.card, guides=guides)
            if committed:
                restore(sequences, committed)
            self._outputs.add(sequences, sink)
            self._commands.post(lambda: self.control.admit(sequences, resumes=bool(committed)))
        return sequences

    def abort(self, choices: Iterable[Sequence]) -> None:
        """End the unfinished choices among `choices` with finish reason `abort`."""
        self._commands.post(partial(self.control.end, choices, ABORTED))

    def abort_stem(self, stem: str, *, is_prefix: bool = False) -> None:
        """Abort the requests with the id `stem`, or `stem_0`, `stem_1`, ..., or `stem-0`, ...

        With `is_prefix`, abort all requests whose ids begin with `stem`.
        """
        self._abort_named(
            lambda name: name.startswith(stem) and (is_prefix or _PART.fullmatch(name, len(stem)) is not None)
        )

    def abort_all(self) -> None:
        """Abort all requests submitted so far."""
        self._abort_named(lambda _: True)

    def flush(self) -> None:
        """Flush the prefix cache before later requests; running requests keep their pages."""
        self._commands.post(self._cycle.scheduler.flush)

    @property
    def is_idle(self) -> bool:
        """Return True if no request is waiting or running."""
        return len(self._outputs) == 0

    def statistics(self) -> dict[str, float]:
        """Return pages, requests and totals of steps by field name, as of now.

        Pages that are only cached count as free. Running and waiting requests are counted in choices.
        """
        num_running = len(self._cycle.scheduler.running)
        return {
            "requests_live": float(len(self._outputs)),
            "requests_waiting": float(max(0, self._outputs.num_unfinished - num_running)),
            **self._cycle.statistics(),
            **self.start_report.statistics(),
            **({} if self.recovery is None else self.recovery.statistics()),
        }

    @property
    def drafts(self) -> tuple[str, DraftTotals] | None:
        """Return the proposer's name and the totals of its drafts; None without speculation."""
        drafted = extension_of(self._cycle.extensions, DraftedSteps)
        return None if drafted is None else (drafted.speculation.proposer.name, drafted.speculation.totals)

    def check_health(self) -> None:
        """Raise EngineStoppedError if the engine is dead or a step exceeds the step timeout."""
        self._commands.check_open()
        started = step_start(self._state.step_started_at, self.recovery)
        if started is not None and time.monotonic() - started > self._settings.cluster.step_timeout_s:
            raise EngineStoppedError(f"a step has been running for over {self._settings.cluster.step_timeout_s} s")

    def check_integrity(self) -> None:
        """Assert, between two steps, that pages and rows agree with an independent count."""
        fault = self._commands.call(partial(_fault_of, self._cycle.scheduler)).result(
            self._settings.cluster.step_timeout_s
        )
        if fault is not None:
            raise fault

    def shutdown(self, ending: FinishReason = ABORTED) -> None:
        """End all requests and stop the thread and the executor. May be called twice."""
        self._state.ending = ending
        self.eplb_control.stop()
        self._commands.close("the engine is shut down")
        self.control.close()
        if self.recovery is not None:
            self.recovery.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._commands.give_up()
        self._executor.shutdown()
        if self.constraints is not None:
            self.constraints.close()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._state.step_started_at = time.monotonic()
                self._outputs.publish(*self._cycle.run(), now=time.monotonic())
                self._state.step_started_at = None
        except Exception as error:
            if not (isinstance(error, ExecutorFailure) and self._commands.is_closed):
                log.exception("the engine has failed")
                self._fail(f"{type(error).__name__}: {error}")
                return
        _end_all(self._outputs, self._state.ending)  # a shutdown may have ended a rebuild
        self.has_failed.set_result(False)

    def _take_commands(self) -> bool:
        """Run queued commands; sleep while idle. Return False once the engine must stop."""
        while not self._commands.is_closed:
            self._state.step_started_at = time.monotonic()
            self._commands.run_all()
            self._state.step_started_at = None
            if self._cycle.has_work:
                return True
            if not self._commands.wait(self._settings.cluster.idle_release_s):
                self._executor.release()
                self._commands.wait()
        return False

    def _abort_named(self, is_meant: Callable[[str], bool]) -> None:
        """Abort the current requests with a matching id; later requests may reuse the id."""
        with self._commands.lock:
            names = filter(is_meant, self._outputs.request_ids)
            self.abort([choice for name in names for choice in self._outputs.unfinished(name)])

    def _fail(self, message: str) -> None:
        """Close the engine and end all requests with an error."""
        with self._commands.lock:
            self._commands.close(f"the engine has failed: {message}")
            self._state.step_started_at = None
        self._commands.give_up()
        _end_all(self._outputs, FinishReason("error", message=f"the engine has failed: {message}"))
        self.has_failed.set_result(True)


@dataclass
class _ThreadState:
    """State of the engine thread that other threads read or set."""

    step_started_at: float | None = None
    """Monotonic start time of the running step or command; None between them."""
    ending: FinishReason = ABORTED
    """Finish reason of requests that still run at the shutdown."""


def _end_all(outputs: OutputDispatch, reason: FinishReason) -> None:
    """End all requests; if a sink raises, the others still end."""
    while len(outputs):
        try:
            outputs.end_all(reason)
        except Exception:
            log.exception("the end of a request could not be sent")


def _fault_of(scheduler: Scheduler) -> AssertionError | None:
    """Return the fault in rows and pages, or None."""
    try:
        scheduler.check_integrity()
    except AssertionError as error:
        return error
    return None


def _log_start(report: StartReport) -> None:
    """Log the numbers of a start, and the chosen kernels line by line."""
    log.info("started: %s", report)
    for operation, choice in report.kernels.items():
        log.info("kernel %s: %s", operation, choice)


def scheduler_for(settings: Settings, card: ModelCard, *, started: StartReport) -> Scheduler:
    """Return the scheduler of an engine whose executor has started."""
    scheduler, cache = settings.scheduler, settings.cache
    limits = StepLimits(
        num_rows=scheduler.max_running_requests,
        step_tokens=scheduler.max_step_tokens,
        chunk_tokens=prefill_chunk_tokens(scheduler),
        page_size=cache.page_size,
        num_pages=started.num_pages,
        page_groups=started.page_groups,
        entry_groups=started.entry_groups,
        max_tokens=card.max_model_len,
        max_adapters=settings.adapters.num_slots,
        step_adapters=settings.adapters.num_per_step,
        num_data_ranks=settings.parallel.data_parallel_size,
        caches_prefixes=cache.enable_prefix_caching,
        verify_rows=verify_rows(scheduler, settings.speculation),
        evicts_by_session=cache.evicts_by_session,
        protected_share=cache.protected_share,
        max_protected_s=cache.max_protected_s,
    )
    return Scheduler(limits, weight_version=card.weight_version)


def _adapters_for(
    settings: AdapterSettings, scheduler: Scheduler, *, keys_in_use: Callable[[], Collection[str]]
) -> AdapterTable | None:
    return AdapterTable(settings, scheduler.table, keys_in_use=keys_in_use) if settings.num_slots else None


def _recovery_for(rebuilder: Rebuilder, cluster: ClusterSettings) -> Recovery:
    bounds = RebuildBounds(cluster.max_rebuilds_in_10_minutes, cluster.max_rebuilds_in_hour)
    return Recovery(rebuilder, bounds)


def capture_for(scheduler: Scheduler, card: ModelCard, *, num_pages: int) -> RoutingCapture:
    """Return the routing capture of a scheduler."""
    return RoutingCapture(card, scheduler.table, num_pages=num_pages, num_data_ranks=len(scheduler.ranks))


def speculation_for(settings: SpeculationSettings, scheduler: Scheduler, *, card: ModelCard) -> Speculation | None:
    """Return the speculation for a scheduler, or None if the settings allow no drafts."""
    if not settings.max_drafts:
        return None
    return Speculation(
        scheduler.table,
        proposer_for(settings),
        max_drafts=settings.max_drafts,
        reach=ExpertReach(card.routing.num_experts, card.routing.top_k),
    )


def cycle_with(  # noqa: PLR0913 (features, by keyword)
    scheduler: Scheduler,
    executor: Executor,
    *,
    eplb: EplbSteps | None = None,
    speculation: Speculation | None = None,
    capture: RoutingCapture | None = None,
    losses: StepLosses | None = None,
    adapters: AdapterTable | None = None,
    hosted: HostedPages | None = None,
    overlaps: bool = True,
) -> StepCycle:
    """Return the step cycle with these features; None leaves a feature out."""
    drafted = None if speculation is None else DraftedSteps(speculation, scheduler, overlaps=overlaps)
    tally = None if eplb is None else SelectionTally(eplb.migration)
    features = (drafted, eplb, adapters, DeferredSampling(scheduler.table), capture, tally, hosted, losses)
    if capture is not None:
        # A request with a cached prefix may want the routing rows of the request that computed it.
        scheduler.captures_all = scheduler.caches_prefixes
        scheduler.on_preemption = capture.preempted
    return StepCycle(
        scheduler,
        executor,
        extensions=[each for each in features if each is not None],
        pacing=drafted or SteadyPace(overlaps=overlaps),
        losses=losses,
    )
