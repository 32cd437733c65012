"""Reservations on a cluster of two fake TPU slices, told as JSON on standard output.

A program of its own: a process has one Ray session, and that of the other cluster tests shall not be disturbed. Every
fake host has 4 `TPU`, its slice's labels, and its slice's name in the environment, as a real one has.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import ray
from ray._private.accelerators import tpu
from ray.cluster_utils import Cluster

from rayserve_moe.cluster.slice_placement import GivenUpError, SliceReservation, reserve_slice
from rayserve_moe.config.settings import ClusterSettings, ModelSettings, ParallelSettings, Settings
from rayserve_moe.rollouts.replica_pool import num_replicas_for

SETTINGS = ClusterSettings(tpu_topology="2x4", tpu_version="v6e", tpu_chips_per_host=4, start_timeout_s=600.0)
HOSTS = (("alpha", 1), ("beta", 0), ("alpha", 0), ("beta", 1))
"""Slice and number of each host, in an order in which neither slices nor numbers are neighbours."""

CHIPS = 4.0


class Probe:
    """What an actor finds around it."""

    def look(self) -> dict[str, Any]:
        labels = ray.get_runtime_context().get_node_labels()
        names = ("TPU_VISIBLE_CHIPS", "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_COORDINATOR_ADDRESS")
        return {
            "slice": labels["ray.io/tpu-slice-name"],
            "number": labels["ray.io/tpu-worker-id"],
            **{name: os.environ.get(name) for name in names},
        }


def start_cluster() -> Cluster:
    """Start one raylet per host; the first one is the head of the cluster too."""
    cluster = Cluster()
    for slice_name, number in HOSTS:
        resources = {"TPU": CHIPS, slice_name: 1.0} | ({"TPU-v6e-8-head": 1.0} if number == 0 else {})
        labels = {
            "ray.io/tpu-slice-name": slice_name,
            "ray.io/tpu-worker-id": str(number),
            "ray.io/tpu-topology": "2x4",
            "ray.io/tpu-pod-type": "v6e-8",
        }
        only_head = {"include_dashboard": False, "dashboard_port": None} if cluster.head_node is None else {}
        environment = {"TPU_NAME": slice_name}
        cluster.add_node(num_cpus=1, resources=resources, labels=labels, env_vars=environment, **only_head)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    return cluster


def probe_hosts(reservation: SliceReservation, num_hosts: int) -> list[dict[str, Any]]:
    """What an actor on each host finds, by host number."""
    remote = ray.remote(Probe)
    actors = [reservation.start_actor(i, remote) for i in range(num_hosts)]
    return ray.get([actor.look.remote() for actor in actors], timeout=1200)


def free_resources() -> dict[str, float]:
    available = ray.available_resources()
    return {name: available.get(name, 0.0) for name in ("TPU", "TPU-v6e-8-head")}


def wait_for(condition: Callable[[], bool], timeout_s: float = 300.0) -> bool:
    """Ray reports what is free with a delay."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def refusal_of(num_slices: int) -> str:
    try:
        reserve_slice(replace(SETTINGS, start_timeout_s=2.0), num_hosts=2 * num_slices, num_slices=num_slices)
    except TimeoutError as error:
        return str(error)
    return "none"


def seconds_to_give_up(num_slices: int) -> float:
    """How long a reservation that cannot succeed goes on after it was given up; -1 where it ended otherwise."""
    given_up, set_at = threading.Event(), []

    def give_up() -> None:
        set_at.append(time.monotonic())
        given_up.set()

    threading.Timer(3.0, give_up).start()
    try:
        reserve_slice(SETTINGS, num_hosts=2 * num_slices, num_slices=num_slices, given_up=given_up)
    except GivenUpError:
        return time.monotonic() - set_at[0]
    return -1.0


def replicas_of(num_slices: int) -> int:
    """Engines that the rollout job would start, each over so many slices."""
    parallel = ParallelSettings(num_hosts=2 * num_slices, num_slices=num_slices)
    return num_replicas_for(Settings(ModelSettings("any"), cluster=SETTINGS, parallel=parallel))


def tell_all() -> dict[str, Any]:
    """One slice, then no room for two more, everything given back, then both."""
    wait_for(lambda: free_resources()["TPU"] == len(HOSTS) * CHIPS)
    told: dict[str, Any] = {"at the start": free_resources(), "replicas": [replicas_of(1), replicas_of(2)]}
    one = reserve_slice(SETTINGS, num_hosts=2)
    told["one slice"] = probe_hosts(one, 2)
    told["left beside one"] = wait_for(lambda: free_resources() == {"TPU": 2 * CHIPS, "TPU-v6e-8-head": 2.0})
    told["replicas beside one"] = replicas_of(1)
    told["refusal of two more"] = refusal_of(2)
    told["left after the refusal"] = wait_for(lambda: free_resources() == {"TPU": 2 * CHIPS, "TPU-v6e-8-head": 2.0})
    told["seconds to give up"] = seconds_to_give_up(2)
    told["left after giving up"] = wait_for(lambda: free_resources() == {"TPU": 2 * CHIPS, "TPU-v6e-8-head": 2.0})
    one.release()
    told["all is given back"] = wait_for(lambda: free_resources() == told["at the start"])
    both = reserve_slice(SETTINGS, num_hosts=4, num_slices=2)
    told["two slices"] = probe_hosts(both, 4)
    both.release()
    both.release()
    told["all is given back again"] = wait_for(lambda: free_resources() == told["at the start"])
    return told


if __name__ == "__main__":
    # No host asks Google's metadata server who it is: looking up a name that does not exist can take minutes.
    with patch.object(tpu, "_get_tpu_metadata", return_value=None):
        running = start_cluster()
    try:
        json.dump(tell_all(), sys.stdout)
    finally:
        ray.shutdown()
        running.shutdown()
