"""Reserving the hosts of one slice: a real TPU slice, or emulated hosts on a CPU cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import slice_placement_group

from rayserve_moe.config.settings import ClusterSettings


@dataclass(frozen=True)
class SliceReservation:
    """A placement group with one bundle per host; it lives until `release`, or as long as its creator."""

    group: PlacementGroup
    num_hosts: int
    host_resources: dict[str, float]

    def actor_options(self, host_id: int) -> dict[str, Any]:
        """Options that put an actor on the host with this number, with all that was reserved there."""
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=host_id, placement_group_capture_child_tasks=True
        )
        custom = {name: amount for name, amount in self.host_resources.items() if name != "CPU"}
        return {
            "num_cpus": self.host_resources.get("CPU", 0),
            "resources": custom,
            "scheduling_strategy": strategy,
        }

    def release(self) -> None:
        remove_placement_group(self.group)


def reserve_slice(cluster: ClusterSettings, *, num_hosts: int) -> SliceReservation:
    """Reserve a slice and wait for it.

    On TPU the slice is named by `tpu_topology` and `tpu_version` and brings its own number of hosts, which must equal
    `num_hosts`: a plain placement group could mix hosts of two slices. On a CPU cluster hosts are spread over the
    nodes there are. TimeoutError after `start_timeout_s`, ValueError for a number of hosts that does not fit.
    """
    reservation = _reserve_tpu(cluster) if cluster.tpu_topology else _reserve_cpu(cluster, num_hosts)
    if reservation.num_hosts != num_hosts:
        reservation.release()
        raise ValueError(
            f"a {cluster.tpu_version} slice of topology {cluster.tpu_topology} has {reservation.num_hosts} hosts, "
            f"num_hosts is {num_hosts}"
        )
    try:
        ray.get(reservation.group.ready(), timeout=cluster.start_timeout_s)
    except GetTimeoutError as error:
        reservation.release()
        raise TimeoutError(
            f"the cluster had no room for {num_hosts} hosts with {reservation.host_resources} each within "
            f"{cluster.start_timeout_s} s"
        ) from error
    return reservation


def _reserve_cpu(cluster: ClusterSettings, num_hosts: int) -> SliceReservation:
    resources = {"CPU": cluster.cpus_per_host}
    return SliceReservation(placement_group([resources] * num_hosts, strategy="SPREAD"), num_hosts, resources)


def _reserve_tpu(cluster: ClusterSettings) -> SliceReservation:
    slice_group = slice_placement_group(
        cluster.tpu_topology, cluster.tpu_version, chips_per_vm=cluster.tpu_chips_per_host or None
    )
    assert slice_group.placement_group is not None, "one slice has one placement group"
    return SliceReservation(
        slice_group.placement_group, slice_group.num_hosts, {"TPU": float(slice_group.devices_per_host)}
    )
