"""The executor of a slice: one worker actor per host, driven over a step transport."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, cast

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.places import one_revision
from rayserve_moe.cluster.host_worker import HostPlace, RemoteHostWorker
from rayserve_moe.cluster.slice_placement import SliceReservation, get, reserve_slice
from rayserve_moe.cluster.step_transport import TRANSPORT_ERRORS, TRANSPORTS, StepTransport
from rayserve_moe.config import derive
from rayserve_moe.config.given_files import Reach, is_url, one_line
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings
from rayserve_moe.engine.step_cycle import ExecutorFailure
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.execution.staged_weights import too_late
from rayserve_moe.requests import WeightsRefusedError
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult, slowest_start

POLL_S = 0.02
"""From asking the hosts whether they have read new weights to asking again."""
DROP_TIMEOUT_S = 10.0


class GroupExecutor:
    """Owns the workers of one slice, as an `engine.step_cycle.Executor`. They die with it, all together.

    Another thread may set `given_up` to end the start, with GivenUpError.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        *,
        parallel: ParallelSettings,
        cluster: ClusterSettings,
        given_up: threading.Event | None = None,
    ) -> None:
        self._settings, self._parallel, self._cluster = settings, parallel, cluster
        self._given_up = given_up or threading.Event()
        self._reservation: SliceReservation | None = None
        self._transport: StepTransport | None = None
        self.workers: list[ActorHandle] = []

    def start(self) -> StartReport:
        """Reserve the hosts, start and join the workers, load, compile. Errors of a worker pass through unchanged.

        GetTimeoutError after `start_timeout_s` from the reservation.
        """
        num_hosts = self._parallel.num_hosts
        self._reservation = reserve_slice(
            self._cluster, num_hosts=num_hosts, num_slices=self._parallel.num_slices, given_up=self._given_up
        )
        self.workers = [self._start_worker(self._reservation, host_id) for host_id in range(num_hosts)]
        deadline = time.monotonic() + self._cluster.start_timeout_s

        def results_of(refs: Any) -> Any:
            return get(refs, timeout_s=deadline - time.monotonic(), given_up=self._given_up)

        coordinator = results_of(self.workers[0].coordinator_address.remote())
        num_pages = min(results_of([worker.load.remote(coordinator) for worker in self.workers]))
        results_of([worker.prepare.remote(num_pages) for worker in self.workers])
        # A host whose peers compile for longer than a collective waits cannot meet them in one: all compile first.
        reports = results_of([worker.warm_up.remote() for worker in self.workers])
        self._transport = TRANSPORTS[derive.transport(self._cluster)](
            self.workers, timeout_s=self._cluster.step_timeout_s
        )
        return slowest_start(reports)

    def execute(self, plan: StepPlan) -> StepResult | None:
        assert self._transport is not None, "start comes first"
        try:
            return self._transport.execute(plan)
        except TRANSPORT_ERRORS as error:
            raise ExecutorFailure(f"step {plan.step_id} was lost: {error}") from error

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        timeout_s = self._settings.updates.staging_timeout_s
        try:
            outcomes = self._staged(
                self._one_revision_of(model_path), expert_of_slot, deadline=time.monotonic() + timeout_s
            )
            refusals = [f"host {host_id}: {refusal}" for host_id, refusal in enumerate(outcomes) if refusal]
            if refusals:
                self._drop_staged()
                raise WeightsRefusedError(refusals[0])
        except GetTimeoutError as error:
            self._drop_staged()
            raise too_late(timeout_s) from error
        except RayTaskError as error:
            self._drop_staged()
            raise WeightsRefusedError("a host could not read the weights") from error
        except RayError as error:
            raise ExecutorFailure(f"a host was lost while it read new weights: {error}") from error

    def _staged(self, model_path: str, expert_of_slot: np.ndarray | None, *, deadline: float) -> list[str]:
        """Have every host read; returns why each of them cannot use the weights. GetTimeoutError after the deadline."""

        def results_of(calls: list[ray.ObjectRef]) -> list[str | None]:
            return ray.get(calls, timeout=max(0.0, deadline - time.monotonic()))

        results_of([worker.begin_staging.remote(model_path, expert_of_slot) for worker in self.workers])
        while None in (outcomes := results_of([worker.staging_outcome.remote() for worker in self.workers])):
            time.sleep(POLL_S)
        return [outcome for outcome in outcomes if outcome is not None]

    def _one_revision_of(self, model_path: str) -> str:
        """The same for all hosts, where it is a URL; WeightsRefusedError where it lies below no root, or nowhere."""
        if not is_url(model_path):
            return model_path
        roots = self._settings.updates.weight_roots
        if not any(is_url(root) for root in roots):
            raise WeightsRefusedError("a URL is read below one of weight_roots only, and none of them is a URL")
        try:
            return one_revision(model_path, Reach(roots))
        except CheckpointError as error:
            raise WeightsRefusedError(one_line(str(error))) from error

    def _drop_staged(self) -> None:
        """Have every host forget what it read. One that does not answer does so before it reads anything else.

        ExecutorFailure where one is lost.
        """
        try:
            with suppress(GetTimeoutError, RayTaskError):
                ray.get([worker.drop_staged.remote() for worker in self.workers], timeout=DROP_TIMEOUT_S)
        except RayError as error:
            raise ExecutorFailure(f"a host was lost while it dropped new weights: {error}") from error

    def release(self) -> None:
        if self._transport is not None:
            self._transport.release()

    def shutdown(self) -> None:
        if self._transport is not None:
            with suppress(RayError):
                self._transport.release()
            self._transport = None
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _start_worker(self, reservation: SliceReservation, host_id: int) -> ActorHandle:
        parallel = self._parallel
        devices = 0 if self._cluster.tpu_topology else max(1, parallel.devices_per_host)
        place = HostPlace(host_id, parallel.num_hosts, devices, parallel.data_parallel_size, parallel.num_slices)
        # A step is a task: recording each of them in the cluster's task events is not worth its cost.
        options = {**reservation.actor_options(host_id), "enable_task_events": False}
        return cast(ActorHandle, RemoteHostWorker.options(**options).remote(self._settings, place))
