"""The worker of a host: joins its peers, lays out the model over all devices, and runs every step plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import ray

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.checkpoints.open_shares import SharePlace, open_share
from rayserve_moe.cluster.channel import Address
from rayserve_moe.cluster.fencing import HostProcess, this_process
from rayserve_moe.cluster.group_pages import COPY_PAGES, copy_shares
from rayserve_moe.cluster.heartbeat import CHANGING, COMPILING, JOINING, LOADING, SERVING, WARMING, Heartbeat
from rayserve_moe.cluster.raylet_watch import end_with_raylet
from rayserve_moe.cluster.startup_memory import freeze_what_stays
from rayserve_moe.cluster.step_transport import listen_for_steps
from rayserve_moe.cluster.weight_keepers import KeptShare, opened_here
from rayserve_moe.cluster.worker_tensors import WorkerTensors
from rayserve_moe.config.derive import sent_copies, server_platform
from rayserve_moe.config.load import set_compiler_flag
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings
from rayserve_moe.execution.fewer_hosts import Parts, pages_beside_copies, pages_with_fewest, settings_of_any_size
from rayserve_moe.execution.memory import free_bytes
from rayserve_moe.execution.native_kernels import kernels_in_words
from rayserve_moe.execution.platforms import check_platform, devices_for, limit_threads, lower_priority
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.execution.weights.placing import open_model
from rayserve_moe.execution.weights.staged import WeightReading
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.observability.fault_points import reach
from rayserve_moe.observability.logs import use_logging
from rayserve_moe.parallel.joining import join_hosts
from rayserve_moe.parallel.mesh import plan_for, use_cpu_devices
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult

log = logging.getLogger(__name__)


class HostWorker:
    """A HostRunner behind the methods of a Ray actor. They are called in the order of their definition."""

    def __init__(self, settings: RunnerSettings, place: HostPlace) -> None:
        use_logging(settings.logging)
        end_with_raylet()
        self._settings, self._place = settings, place
        self._heartbeat = Heartbeat()

    def process(self) -> HostProcess:
        """Return the worker's process. It has loaded all libraries and touched no device."""
        return this_process()

    def listen_for_watch(self, key: bytes, timeout_s: float) -> Address:
        """Start beating to the first peer that proves `key` within `timeout_s`; return the address to connect to."""
        return self._heartbeat.listen(host=ray.util.get_node_ip_address(), key=key, timeout_s=timeout_s)

    def load(
        self,
        coordinator: str,
        source: str = "",
        *,
        kept: SharePlace | None = None,
        spread: Sequence[KeptShare] = (),
        placement: ExpertPlacement | None = None,
    ) -> int:
        """Meet the other hosts and load this host's share; return the number of KV pages that fit here.

        Weights other than the configured ones come from a checkpoint `source`, from this host's `kept` share of sent
        weights, or from the shares `spread` over the hosts of a group of another size. Unless they are `kept`, experts
        lie as `placement` says, or in their own order.
        """
        place = self._place
        log.info("host %d of %d loads %s", place.host_id, place.num_hosts, source or self._settings.model.path)
        settings, plan = lay_out(self._settings, place, coordinator=coordinator, enter=self._heartbeat.enter)
        self._runner = HostRunner(settings, plan, placement=placement)
        kernels, served = kernels_in_words(self._runner.config.kernels), self._runner.served
        how = served.dtype, kernels, served.expert_dtype
        log.info("host %d computes in %s by the kernels %s, with experts in %s", place.host_id, *how)
        self._reading = WeightReading(self._runner.staged)
        share = None if kept is None else open_share(kept)
        self._tensors = WorkerTensors(self._runner.tensors, self._reading, share=share, adapters=self._runner.adapters)
        num_pages = self._runner.load(source, share=share, spread=opened_here(spread))
        if place.parts is not None and place.parts.minimum < place.parts.now:
            free = free_bytes(list(plan.mesh.local_devices))
            num_pages = min(num_pages, pages_with_fewest(served, place.parts, free=free))
        num_copies, share_bytes = place.sent_copies[share is not None], self._runner.tensors.share_bytes
        return pages_beside_copies(served, num_pages, num_copies=num_copies, share_bytes=share_bytes)

    def prepare(self, num_pages: int) -> None:
        """Allocate `num_pages` pages, the same on all hosts, and compile."""
        self._heartbeat.enter(COMPILING)
        self._runner.compile(num_pages)

    def warm_up(self) -> StartReport:
        """Run every program once, together with all hosts, which have all compiled by now."""
        self._heartbeat.enter(WARMING)
        report = self._runner.warm_up()
        freeze_what_stays()
        if self._place.num_cpu_devices:
            lower_priority()
        self._heartbeat.enter(SERVING)
        return report

    def listen_for_steps(self, key: bytes, timeout_s: float) -> Address:
        """Also accept steps from the first connection that proves `key` within `timeout_s`; return the address."""
        return listen_for_steps(self.execute, host=ray.util.get_node_ip_address(), key=key, timeout_s=timeout_s)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Launch a step and wait for the previous step. Only the first host returns a result."""
        with self._heartbeat.step(plan.step_id, phase=CHANGING if plan.takes_staged_weights else SERVING):
            reach("step", plan)
            result = self._runner.execute(plan)
        if plan.takes_staged_weights:
            self._tensors.swap()
        return result if self._place.host_id == 0 else None

    def begin_staging(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        """Start reading other weights in the background; `staging_outcome` reports the end."""
        owned = None if expert_of_slot is None else np.array(expert_of_slot)
        self._reading.begin(model_path, owned)

    def answer(self, call: str, *arguments: Any) -> Any:
        """Run a call beside the steps: COPY_PAGES, or a call of `WorkerTensors`."""
        if call == COPY_PAGES:
            pages, *shares = arguments
            return copy_shares(self._runner.pages, pages, shares=next(iter(shares), None))
        return self._tensors.answer(call, *arguments)

    def staging_outcome(self) -> str | None:
        """Return None while weights are being read, empty once they are staged, otherwise why they cannot be used."""
        return self._reading.outcome()

    def drop_staged(self) -> None:
        """Drop staged weights and cancel a running read."""
        self._reading.give_up()
        self._tensors.drop()

    def num_compilations_since_start(self) -> int:
        return self._runner.num_compilations_since_start


RemoteHostWorker = ray.remote(HostWorker)


def limit_collectives(timeout_s: float) -> None:
    """Make collectives between CPU hosts fail if a peer does not arrive in time; XLA's default limit is 30 minutes."""
    set_compiler_flag("xla_cpu_collective_timeout_seconds", math.ceil(timeout_s))


@dataclass(frozen=True)
class HostPlace:
    """A host's index in its group, its devices, and how the group is laid out."""

    host_id: int
    num_hosts: int
    num_cpu_devices: int
    """Number of emulated devices; 0: the host's own."""
    platform: str = "auto"
    """Platform that the devices must have."""
    data_size: int = 1
    num_slices: int = 1
    collective_timeout_s: float = 120.0
    """Maximum wait of emulated hosts for each other in a collective."""
    parts: Parts | None = None
    """Set if the group may serve with fewer slices or hosts."""
    sent_copies: tuple[int, int] = (0, 0)
    """Copies of its weights that host memory must hold beside them: without, and with a kept share."""


def place_of(
    host_id: int, parallel: ParallelSettings, *, cluster: ClusterSettings, parts: Parts | None = None
) -> HostPlace:
    """Return the place of a host in its group."""
    return HostPlace(
        host_id,
        parallel.num_hosts,
        num_cpu_devices=max(1, parallel.devices_per_host) if server_platform(cluster) == "cpu" else 0,
        platform=server_platform(cluster),
        data_size=parallel.data_parallel_size,
        num_slices=parallel.num_slices,
        collective_timeout_s=cluster.step_timeout_s,
        parts=parts,
        sent_copies=sent_copies(cluster),
    )


def lay_out(
    settings: RunnerSettings, place: HostPlace, *, coordinator: str, enter: Callable[[str], object] = lambda _: None
) -> tuple[RunnerSettings, ParallelPlan]:
    """Meet the other hosts; return the runner settings and the plan over all devices. `enter` records the phase."""
    if place.num_cpu_devices:
        limit_threads(settings.model.path)
        if place.num_hosts > 1:
            limit_collectives(place.collective_timeout_s)
        use_cpu_devices(place.num_cpu_devices)
    if place.num_hosts > 1:
        enter(JOINING)
        join_hosts(coordinator, num_hosts=place.num_hosts, host_id=place.host_id)
        reach("joined", place)
        devices = jax.devices()
        check_platform(devices, wanted=place.platform)
    else:
        devices = devices_for(place.num_cpu_devices, wanted=place.platform)
    enter(LOADING)
    plan = plan_for(devices, data_size=place.data_size, num_slices=place.num_slices)
    if place.parts is not None:
        spec = spec_from_config(open_model(settings.model).config)
        settings = settings_of_any_size(settings, spec=spec, plan=plan)
    return settings, plan
