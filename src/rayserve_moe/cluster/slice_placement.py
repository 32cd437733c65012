"""Reservation of a group's hosts: TPU slices or emulated hosts of a CPU cluster, and fewer of them after a loss."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import get_tpu_coordinator_env_vars, infer_tpu_pod_type_from_topology, slice_placement_group

from rayserve_moe.config.derive import group_sizes, server_platform, units_of_loss
from rayserve_moe.config.setting_fields import DAY_S
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings, SettingsError
from rayserve_moe.config.topology import TpuSlice, slice_for
from rayserve_moe.engine.executor import GroupLayout
from rayserve_moe.execution.fewer_hosts import Parts
from rayserve_moe.scheduling.step_plan import StartReport

log = logging.getLogger(__name__)

FEWER_TIMEOUT_S = 10.0
"""Timeout for a group of fewer hosts, which are either available at once or not at all."""
RETURN_POLL_S = 0.5
"""Interval for checking that returned hosts are still there."""


class GroupPlaces:
    """Reserves the hosts of a group. `parallel` is the current size: the whole, or less with `elastic_after_s`.

    `on_return` is called from another thread once missing hosts have been available for `elastic_after_s`.
    """

    def __init__(self, parallel: ParallelSettings, cluster: ClusterSettings, *, given_up: threading.Event) -> None:
        self.parallel = parallel
        self.on_return: Callable[[], object] = lambda: None
        self._whole, self._cluster, self._given_up = parallel, cluster, given_up
        self._reservation: SliceReservation | None = None
        self._watch: ReturnWatch | None = None
        self._has_served = False

    @property
    def parts(self) -> Parts | None:
        """Return the current and minimum number of slices or emulated hosts; None if the group is always whole."""
        if not self._cluster.elastic_after_s:
            return None
        num_parts = units_of_loss(self._cluster, self._whole)
        now = num_parts * self.parallel.num_hosts // self._whole.num_hosts
        return Parts(now, num_parts - self._cluster.elastic_max_lost)

    @property
    def are_back(self) -> bool:
        """Return True if missing hosts have been available for long enough."""
        return self._watch is not None and self._watch.are_back

    def reserve(self) -> SliceReservation:
        """Return a reservation of live hosts: the current one if it is intact, otherwise a new reservation.

        Raises TimeoutError, GivenUpError and SettingsError like `reserve_slice`.
        """
        if self._reservation is not None:
            if self._reservation.is_whole and not self.are_back:
                return self._reservation
            self.release()
        self._end_watch()
        sizes = group_sizes(self._cluster, self._whole) if self._has_served else (self._whole,)
        limits = [self._cluster.elastic_after_s, *[FEWER_TIMEOUT_S] * len(sizes)]
        for size, timeout_s in zip(sizes[:-1], limits, strict=False):
            try:
                return self._reserve(size, timeout_s=timeout_s)
            except TimeoutError:
                log.warning("not all of %d hosts are available: the group is to serve with fewer", size.num_hosts)
        return self._reserve(sizes[-1], timeout_s=self._cluster.start_timeout_s)

    def serve(self, report: StartReport) -> GroupLayout:
        """Record that a group serves here and watch for missing hosts; return the layout it serves with."""
        self._has_served = True
        whole, parallel = self._whole, self.parallel
        num_missing = whole.num_hosts - parallel.num_hosts
        if num_missing and self._watch is None:
            num_slices = max(1, whole.num_slices - parallel.num_slices)
            missing = replace(whole, num_hosts=num_missing, num_slices=num_slices)
            self._watch = ReturnWatch(missing, self._cluster, on_return=self.on_return)
        return GroupLayout(
            parallel.data_parallel_size,
            report.num_expert_ranks,
            report.num_redundant_experts,
            num_hosts=parallel.num_hosts,
            num_slices=parallel.num_slices,
            num_missing_hosts=num_missing,
        )

    def release(self) -> None:
        """Give up the reservation; actors that still run on it are killed. May be called twice."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def close(self) -> None:
        """End the watch and give up the reservation."""
        self._end_watch()
        self.release()

    def _reserve(self, size: ParallelSettings, *, timeout_s: float) -> SliceReservation:
        self._reservation = reserve_slice(
            replace(self._cluster, start_timeout_s=timeout_s),
            num_hosts=size.num_hosts,
            num_slices=size.num_slices,
            devices_per_host=size.devices_per_host,
            given_up=self._given_up,
        )
        self.parallel = size
        return self._reservation

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


class ReturnWatch:
    """Waits in a thread until the `missing` hosts can be reserved and have stayed for `elastic_after_s`.

    Its reservation keeps others from taking the hosts meanwhile. `are_back` is set before `on_return` is called.
    """

    def __init__(self, missing: ParallelSettings, cluster: ClusterSettings, *, on_return: Callable[[], object]) -> None:
        self._missing, self._cluster, self._on_return = missing, cluster, on_return
        self._stopped = threading.Event()
        self.are_back = False
        self._thread = threading.Thread(target=self._run, name="returning-hosts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and wait until nothing is reserved. Not to be called from `on_return`."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        cluster, missing = replace(self._cluster, start_timeout_s=DAY_S), self._missing
        while not self._stopped.is_set():
            try:
                place = reserve_slice(
                    cluster,
                    num_hosts=missing.num_hosts,
                    num_slices=missing.num_slices,
                    devices_per_host=missing.devices_per_host,
                    given_up=self._stopped,
                )
            except (GivenUpError, TimeoutError):
                continue
            try:
                if self._stay(place):
                    self.are_back = True
            finally:
                place.release()
            if self.are_back:
                self._on_return()
                return

    def _stay(self, place: SliceReservation) -> bool:
        """Return True if the hosts stay for `elastic_after_s`."""
        waited_s = 0.0
        while waited_s < self._cluster.elastic_after_s:
            if self._stopped.wait(RETURN_POLL_S) or not place.is_whole:
                return False
            waited_s += RETURN_POLL_S
        return True


RAY_VERSIONS = {"v5e": "v5litepod"}
"""Ray's names of TPU generations that differ from ours."""

WORKER_ID_LABEL = "ray.io/tpu-worker-id"
POD_TYPE_LABEL = "ray.io/tpu-pod-type"
SLICE_NAME_LABEL = "ray.io/tpu-slice-name"
POLL_S = 0.25

Host = tuple[int, dict[str, str]]
"""A host's bundle index in the placement group, and environment variables to set before jax starts."""


class GivenUpError(RuntimeError):
    """The start was aborted by another thread."""


@dataclass(frozen=True)
class SliceReservation:
    """A placement group with a bundle per host; it lives until `release` or the end of its creator.

    Hosts are numbered slice by slice, and within a slice by the slice's own numbers.
    """

    group: PlacementGroup
    host_resources: dict[str, float]
    hosts: tuple[Host, ...]

    def start_actor(self, host_id: int, actor_class: Any, *arguments: Any, takes_resources: bool = True) -> ActorHandle:
        """Start an actor on a host. It uses the resources reserved there if `takes_resources`."""
        bundle, environment = self.hosts[host_id]
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
        )
        amounts = self.host_resources if takes_resources else {}
        remote = actor_class.options(
            num_cpus=amounts.get("CPU", 0),
            num_gpus=amounts.get("GPU", 0),
            resources={name: amount for name, amount in amounts.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=strategy,
            runtime_env={"env_vars": environment} if environment else {},
            # A step is a task: recording each of them in the cluster's task events is not worth its cost.
            enable_task_events=False,
        )
        return remote.remote(*arguments)

    @property
    def nodes(self) -> list[str]:
        """Return the node ids of the hosts, in host order."""
        node_of_bundle = placement_group_table(self.group)["bundles_to_node_id"]
        return [node_of_bundle[bundle] for bundle, _ in self.hosts]

    @property
    def is_whole(self) -> bool:
        """Return True if Ray reports the node of every host as alive."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}.issuperset(self.nodes)

    def release(self) -> None:
        """Remove the placement group; actors that still run on it are killed. May be called twice."""
        remove_placement_group(self.group)


def reserve_slice(
    cluster: ClusterSettings,
    *,
    num_hosts: int,
    num_slices: int = 1,
    devices_per_host: int = 0,
    given_up: threading.Event | None = None,
) -> SliceReservation:
    """Reserve `num_hosts` hosts in total over all slices, and wait for them.

    On TPU the slices are selected by `tpu_topology` and `tpu_version`, because a plain placement group could mix hosts
    of two slices. On a CPU cluster the hosts are spread over the nodes. With GPUs each host also takes
    `devices_per_host` of them, or all of a node. Raises SettingsError, before anything is reserved, if the slices do
    not have this number of hosts, or no node has a GPU; TimeoutError after `start_timeout_s`; GivenUpError once another
    thread has set `given_up`. After an error nothing stays reserved.
    """
    if cluster.tpu_topology:
        return _reserve_tpu(cluster, num_hosts=num_hosts, num_slices=num_slices, given_up=given_up or threading.Event())
    resources = {"CPU": cluster.cpus_per_host}
    if server_platform(cluster) == "gpu":
        resources["GPU"] = float(devices_per_host or gpus_of_node(ray.nodes()))
    return _reserve_nodes(cluster, num_hosts, given_up or threading.Event(), resources=resources)


def gpus_of_node(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest number of GPUs on a node. Raises SettingsError if no live node has one."""
    counts = [int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]]
    if not any(counts):
        raise SettingsError(f"platform gpu: Ray finds no GPU on any of {len(counts)} nodes")
    return max(counts)


def get(refs: Any, *, timeout_s: float, given_up: threading.Event) -> Any:
    """Call `ray.get` on one or several refs, but raise GivenUpError soon after the event is set.

    A thread that still waits in `ray.get` when its process leaves Ray ends the whole process.
    """
    deadline = time.monotonic() + timeout_s
    while not given_up.is_set():
        try:
            return ray.get(refs, timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))
        except GetTimeoutError:
            if time.monotonic() >= deadline:
                raise
    raise GivenUpError("the start was given up")


def _reserve_nodes(
    cluster: ClusterSettings, num_hosts: int, given_up: threading.Event, *, resources: dict[str, float]
) -> SliceReservation:
    group = placement_group([resources] * num_hosts, strategy="SPREAD")
    with ExitStack() as undo:
        undo.callback(remove_placement_group, group)
        try:
            get(group.ready(), timeout_s=cluster.start_timeout_s, given_up=given_up)
        except GetTimeoutError as error:
            waited_for = f"{num_hosts} hosts with {resources} each within {cluster.start_timeout_s} s"
            raise TimeoutError(f"the cluster had no capacity for {waited_for}") from error
        undo.pop_all()
    return SliceReservation(group, resources, tuple((i, {}) for i in range(num_hosts)))


def _reserve_tpu(
    cluster: ClusterSettings, *, num_hosts: int, num_slices: int, given_up: threading.Event
) -> SliceReservation:
    """Reserve the head of each slice, then all hosts that carry the slice's name."""
    tpu = slice_for(cluster, num_hosts=num_hosts, num_slices=num_slices)
    deadline = time.monotonic() + cluster.start_timeout_s
    with ExitStack() as heads, ExitStack() as undo:
        try:
            labels = []
            if tpu.num_hosts > 1:
                for _ in range(num_slices):
                    name = _reserve_head(tpu, heads, deadline=deadline, given_up=given_up)
                    labels += [{SLICE_NAME_LABEL: name}] * tpu.num_hosts
            slices = slice_placement_group(
                tpu.topology,
                _ray_version(tpu),
                num_slices=num_slices,
                chips_per_vm=tpu.chips_per_host,
                bundle_label_selector=labels or None,
            )
            undo.callback(slices.shutdown)
            group = slices.placement_group
            assert group is not None and slices.num_hosts == num_hosts, "Ray counts other hosts than the topology has"
            get(group.ready(), timeout_s=deadline - time.monotonic(), given_up=given_up)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the cluster had no {num_slices} free {tpu.version} slices of topology {tpu.topology} "
                f"({num_hosts} hosts of {tpu.chips_per_host} chips in all) within {cluster.start_timeout_s} s"
            ) from error
        hosts = _number_hosts(group, num_slices=num_slices, hosts_per_slice=tpu.num_hosts)
        undo.pop_all()
    return SliceReservation(group, {"TPU": float(slices.devices_per_host)}, hosts)


def _reserve_head(tpu: TpuSlice, heads: ExitStack, *, deadline: float, given_up: threading.Event) -> str:
    """Reserve the head of a free slice until `heads` is closed; return the slice's name.

    Ray's own function waits for a head in a call that cannot be interrupted.
    """
    pod_type = infer_tpu_pod_type_from_topology(tpu.topology, f"TPU-{_ray_version(tpu).upper()}")
    selector = {WORKER_ID_LABEL: "0", POD_TYPE_LABEL: str(pod_type)}
    group = placement_group([{f"TPU-{pod_type}-head": 1}], bundle_label_selector=[selector])
    heads.callback(remove_placement_group, group)
    get(group.ready(), timeout_s=deadline - time.monotonic(), given_up=given_up)
    (node_id,) = placement_group_table(group)["bundles_to_node_id"].values()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
    return node["Labels"][SLICE_NAME_LABEL]


def _ray_version(tpu: TpuSlice) -> str:
    return RAY_VERSIONS.get(tpu.version, tpu.version)


def _number_hosts(group: PlacementGroup, *, num_slices: int, hosts_per_slice: int) -> tuple[Host, ...]:
    """Order the bundles of each slice by the numbers that the slice gives to their hosts.

    On a TPU jax takes its process numbers from the slice, so both orders agree. Hosts of several slices use the first
    host as their coordinator.
    """
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    node_of_bundle = placement_group_table(group)["bundles_to_node_id"]

    def number_in_slice(bundle: int) -> tuple[int, int]:
        labels = nodes[node_of_bundle[bundle]].get("Labels") or {}
        return int(labels.get(WORKER_ID_LABEL, bundle % hosts_per_slice)), bundle

    ordered = [
        bundle
        for first in range(0, num_slices * hosts_per_slice, hosts_per_slice)
        for bundle in sorted(range(first, first + hosts_per_slice), key=number_in_slice)
    ]
    if num_slices == 1:
        return tuple((bundle, {}) for bundle in ordered)
    coordinator = nodes[node_of_bundle[ordered[0]]]["NodeManagerAddress"]
    return tuple(
        (bundle, get_tpu_coordinator_env_vars(coordinator, num_slices, bundle // hosts_per_slice)) for bundle in ordered
    )
