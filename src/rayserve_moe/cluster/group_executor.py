"""The executor of a slice: a worker actor per host, driven over a step transport, and standbys for lost workers."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rayserve_moe.balancing.placement import ExpertPlacement, lowered_redundancy
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.places import one_revision
from rayserve_moe.cluster.group_pages import GroupPages
from rayserve_moe.cluster.host_group import GroupWeights, HostGroup
from rayserve_moe.cluster.host_worker import RemoteHostWorker, place_of
from rayserve_moe.cluster.slice_placement import GroupPlaces, SliceReservation
from rayserve_moe.cluster.weight_keepers import SharesLostError
from rayserve_moe.cluster.weight_sources import WeightSources
from rayserve_moe.config.given_files import Reach, is_url, one_line
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings
from rayserve_moe.engine.executor import ExecutorFailure, GroupLayout
from rayserve_moe.execution.fewer_hosts import wanted_redundancy
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.execution.weights.placing import open_model
from rayserve_moe.execution.weights.staged import too_late
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.observability.fault_points import reach
from rayserve_moe.requests.records import WeightsRefusedError
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult

log = logging.getLogger(__name__)

POLL_S = 0.02
"""Interval for asking the hosts whether they have read new weights."""
DROP_TIMEOUT_S = 10.0


class PlaceExperts(Protocol):
    """Returns a placement for ranks, given the former rank of each (None for a new one); None for their own order."""

    def __call__(self, former_ranks: Sequence[int | None], *, num_redundant: int) -> ExpertPlacement | None: ...


class GroupExecutor:
    """Owns the workers of a slice, as an `engine.executor.Executor`. They end with it, all together.

    It is also an `engine.recovery.hosts.Rebuilder`: `rebuild` replaces the workers, and the new ones load the weights
    that served last. Another thread may set `given_up` to abort the start with GivenUpError.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        *,
        parallel: ParallelSettings,
        cluster: ClusterSettings,
        given_up: threading.Event | None = None,
    ) -> None:
        self._settings, self._cluster = settings, cluster
        self._given_up = given_up or threading.Event()
        self._places = GroupPlaces(parallel, cluster, given_up=self._given_up)
        self._places.on_return = self._report_loss
        self._group: HostGroup | None = None
        self.sources = WeightSources(
            lambda: self.workers,
            cluster,
            timeout_s=lambda: self._settings.updates.staging_timeout_s,
            on_change=self._report_loss,
        )
        self.tensors, self.adapters = self.sources.tensors, self.sources.adapters
        self.pages = GroupPages(lambda: self.workers)
        self._standbys = Standbys()
        self._clock = PhaseClock()
        self.on_loss: Callable[[], object] = lambda: None
        self.place_experts: PlaceExperts = lambda *_, **__: None
        """Returns a placement for ranks of hosts of another number."""
        self.layout = GroupLayout()
        self._nodes: list[str] = []
        """Node of each host that serves, or served last."""
        self.workers: list[ActorHandle] = []

    @property
    def phase(self) -> str:
        """Return the current phase of a rebuild."""
        return self._clock.phase

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """Return the total seconds of all rebuilds by phase."""
        return self._clock.seconds

    @property
    def loss(self) -> ExecutorFailure | None:
        """Return a fault of the serving workers that was noticed outside a step, or None.

        Also reports, with `is_loss=False`, that missing hosts are back, if the serving weights can be loaded again.
        """
        group = self._group
        if group is not None and group.loss is not None:
            return ExecutorFailure(group.loss)
        is_due = self._places.are_back and self.sources.serving.is_there
        return ExecutorFailure("missing hosts are back", is_loss=False) if is_due else None

    def start(self) -> StartReport:
        """Reserve the hosts, start and join the workers, load and compile. A worker's errors pass through unchanged.

        Raises GetTimeoutError `start_timeout_s` after the reservation.
        """
        report = replace(self._start(), placement=self.sources.serving.placement)
        self.sources.serving = replace(self.sources.serving, num_pages=report.num_pages)
        self._clock.seconds.clear()
        return report

    def begin_with(self, weights: GroupWeights) -> None:
        """Set the weights to load at the start in place of the configured ones."""
        self.sources.serving = weights

    def rebuild(self) -> None:
        self._clock.enter("ending")
        self._end_group()
        self.sources.drop_waiting()
        try:
            report = self._start()
        except (RayError, TimeoutError, OSError, RuntimeError, ValueError) as error:
            is_final = isinstance(error, SharesLostError)
            raise ExecutorFailure(f"{self.phase}: {type(error).__name__}: {error}", is_final=is_final) from error
        log.info("the rebuilt group serves: %s", report)

    def cancel(self) -> None:
        self._given_up.set()

    def execute(self, plan: StepPlan) -> StepResult | None:
        assert self._group is not None, "start comes first"
        result = self._group.execute(plan)
        if plan.takes_staged_weights:
            self.sources.swap()
        return result

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        timeout_s = self._settings.updates.staging_timeout_s
        try:
            source = self._one_revision_of(model_path)
            outcomes = self._staged(source, expert_of_slot, deadline=time.monotonic() + timeout_s)
            refusals = [f"host {host_id}: {refusal}" for host_id, refusal in enumerate(outcomes) if refusal]
            if refusals:
                self._drop_staged()
                raise WeightsRefusedError(refusals[0])
            self.sources.record_read(source)
        except GetTimeoutError as error:
            self._drop_staged()
            raise too_late(timeout_s) from error
        except RayTaskError as error:
            self._drop_staged()
            raise WeightsRefusedError("a host could not read the weights") from error
        except RayError as error:
            raise ExecutorFailure(f"a host was lost while it read new weights: {error}") from error

    def _staged(self, model_path: str, expert_of_slot: np.ndarray | None, *, deadline: float) -> list[str]:
        """Make every host read the weights; return per host why it cannot use them, empty if it can.

        Raises GetTimeoutError after the deadline.
        """

        def results_of(calls: list[ray.ObjectRef]) -> list[str | None]:
            return ray.get(calls, timeout=max(0.0, deadline - time.monotonic()))

        workers = list(self.workers)  # A rebuild may replace the workers meanwhile; the new ones have read nothing.
        results_of([worker.begin_staging.remote(model_path, expert_of_slot) for worker in workers])
        reach("staging", self)
        while None in (outcomes := results_of([worker.staging_outcome.remote() for worker in workers])):
            time.sleep(POLL_S)
        return [outcome for outcome in outcomes if outcome is not None]

    def _one_revision_of(self, model_path: str) -> str:
        """Return a path as it is, and a URL with a revision that is the same for all hosts.

        Raises WeightsRefusedError if the URL is below no root or does not exist.
        """
        if not is_url(model_path):
            return model_path
        roots = self._settings.updates.weight_roots
        if not any(is_url(root) for root in roots):
            raise WeightsRefusedError("a URL must be below an entry of weight_roots, and no entry is a URL")
        try:
            return one_revision(model_path, Reach(roots))
        except CheckpointError as error:
            raise WeightsRefusedError(one_line(str(error))) from error

    def _drop_staged(self) -> None:
        """Make every host discard what it read. A host that does not answer discards it before its next read.

        Raises ExecutorFailure if a host is lost.
        """
        try:
            with suppress(GetTimeoutError, RayTaskError):
                ray.get([worker.drop_staged.remote() for worker in self.workers], timeout=DROP_TIMEOUT_S)
        except RayError as error:
            raise ExecutorFailure(f"a host was lost while it dropped new weights: {error}") from error

    def release(self) -> None:
        if self._group is not None:
            self._group.release()

    def shutdown(self) -> None:
        self._clock.enter("ended")
        self._standbys.end()
        self.sources.keepers.end()
        self._end_group()
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        self._places.close()

    def _start(self) -> StartReport:
        """Reserve hosts, start workers there and load the weights that serve."""
        if not self.sources.serving.is_there:
            raise SharesLostError("the serving weights were sent and no copy was kept")
        self._clock.enter("placing")
        before = self._places.parallel
        reservation = self._places.reserve()
        parallel, serving = self._places.parallel, self.sources.bring(reservation.nodes)
        if parallel != before:
            self._standbys.end()
        placement = self._placement_on(reservation.nodes)
        hosts, waiting = range(parallel.num_hosts), self._standbys.take()
        self.workers = [waiting.get(host_id) or self._start_worker(reservation, host_id) for host_id in hosts]
        self._group = group = HostGroup(self.workers, self._cluster, on_loss=self._report_loss, given_up=self._given_up)
        report = group.start(replace(serving, first=placement), enter=self._clock.enter)
        self.sources.settle()
        self.adapters.add_again()
        self.layout = replace(self._places.serve(report), placement=placement)
        self._nodes = reservation.nodes
        if self._cluster.standby_workers:
            self._standbys.start_soon(
                {host_id: partial(self._start_worker, reservation, host_id, waits=True) for host_id in hosts}
            )
        return report

    def _placement_on(self, nodes: list[str]) -> ExpertPlacement | None:
        """Return the placement with which hosts on these nodes begin: in a group of another size they keep experts."""
        layout = self.layout
        if not self._nodes or len(nodes) == len(self._nodes):
            return layout.placement
        per_host = layout.num_expert_ranks // layout.num_hosts
        former, ranks = list(self._nodes), []
        for node in nodes:
            host = former.index(node) if node in former else None
            ranks += [None] * per_host if host is None else range(host * per_host, (host + 1) * per_host)
            if host is not None:
                former[host] = ""
        router = spec_from_config(open_model(self._settings.model).config).router
        wanted = wanted_redundancy(self._settings.experts, num_experts=router.num_experts, ep_size=len(ranks))
        num_redundant = lowered_redundancy(router.num_experts, ep_size=len(ranks), wanted=wanted)
        return self.place_experts(ranks, num_redundant=num_redundant)

    def _end_group(self) -> None:
        if self._group is not None:
            self._group.end()
            self._group, self.workers = None, []

    def _report_loss(self) -> None:
        self.on_loss()

    def _start_worker(self, reservation: SliceReservation, host_id: int, *, waits: bool = False) -> ActorHandle:
        """Start a worker on a host. With `waits`, as a standby, it takes none of the resources reserved there."""
        place = place_of(host_id, self._places.parallel, cluster=self._cluster, parts=self._places.parts)
        return reservation.start_actor(host_id, RemoteHostWorker, self._settings, place, takes_resources=not waits)


DELAY_S = 3.0
"""Seconds from serving to the start of standbys.

The first steps of a new group need the cores: they recompute the pages of running requests.
"""
ANSWER_S = 2.0
"""Seconds that a standby may take to answer before it is killed."""


class Standbys:
    """A standby worker per host, started by a timer thread after a group begins to serve."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, ActorHandle] = {}
        self._timer: threading.Timer | None = None

    def start_soon(self, starters: Mapping[int, Callable[[], ActorHandle]], *, delay_s: float = DELAY_S) -> None:
        """Call the starters, by host, after `delay_s` seconds, unless `take` or `end` is called first."""
        self._timer = threading.Timer(delay_s, self._start, (starters,))
        self._timer.daemon = True
        self._timer.start()

    def take(self) -> dict[int, ActorHandle]:
        """Return the standbys that answer, by host, and keep none of them."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            waiting, self._waiting = self._waiting, {}
        return {host_id: worker for host_id, worker in waiting.items() if _answers(worker)}

    def end(self) -> None:
        """Kill all standbys."""
        for worker in self.take().values():
            ray.kill(worker)

    def _start(self, starters: Mapping[int, Callable[[], ActorHandle]]) -> None:
        with self._lock, suppress(RayError):
            if self._timer is threading.current_thread():
                self._waiting = {host_id: start() for host_id, start in starters.items()}


def _answers(worker: ActorHandle) -> bool:
    try:
        ray.get(worker.process.remote(), timeout=ANSWER_S)
    except RayError:
        ray.kill(worker)
        return False
    return True


class PhaseClock:
    """The current `phase` and the total `seconds` of ended phases. A single thread enters; any may read."""

    def __init__(self) -> None:
        self.phase = ""
        self.seconds: dict[str, float] = defaultdict(float)
        self._since = time.monotonic()

    def enter(self, phase: str) -> None:
        """Begin a phase and end the previous one."""
        now = time.monotonic()
        if self.phase not in ("", "serving"):
            self.seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now
