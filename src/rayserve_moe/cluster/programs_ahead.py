"""Programs of groups that may come, compiled while another serves, by short-lived processes on its hosts.

A process of the group that serves cannot: its jax belongs to as many processes as there are now.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayserve_moe.cluster.host_group import coordinate
from rayserve_moe.cluster.host_layout import HostPlace, lay_out, place_of
from rayserve_moe.cluster.slice_placement import GivenUpError, get
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings
from rayserve_moe.execution.fewer_hosts import Parts
from rayserve_moe.execution.programs.cache import kept_programs
from rayserve_moe.execution.programs.compiled import compile_served
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.observability.logs import use_logging

log = logging.getLogger(__name__)

DELAY_S = 5.0
"""From serving to the first of them: first steps of a new group, and its standbys, need the cores."""
LOWEST_PRIORITY = 19
Size = tuple[ParallelSettings, Parts | None]
"""A group that may come, and what it is of the whole."""


class AheadWorker:
    """One host of a group that is to come, without weights and at the lowest priority."""

    def __init__(self, settings: RunnerSettings, place: HostPlace) -> None:
        use_logging(settings.logging)
        self._settings, self._place = settings, place

    def compile(self, coordinator: str, num_pages: int) -> tuple[int, int]:
        """Meet the others, and keep the programs on disk; returns how many there are, and how many were there."""
        os.nice(LOWEST_PRIORITY)
        settings, plan = lay_out(self._settings, self._place, coordinator=coordinator)
        kept = kept_programs(settings.compile, plan)
        times = compile_served(HostRunner(settings, plan).served, num_pages=num_pages, kept=kept).times
        return times.num_programs, times.num_found


RemoteAheadWorker = ray.remote(AheadWorker)


class ProgramsAhead:
    """Compiles in a thread of its own, for one group at a time. `num_compiled` counts by their numbers of hosts.

    Any host may become any of a smaller group, and keeps its programs itself: each compiles those of each in turn.
    """

    def __init__(self, settings: RunnerSettings, cluster: ClusterSettings) -> None:
        self._settings, self._cluster = settings, cluster
        self._ended = threading.Event()
        self._done: set[tuple[str, ...]] = set()
        self.num_compiled: dict[int, int] = {}

    def start_soon(self, sizes: Sequence[Size], nodes: Sequence[str], *, num_pages: int) -> None:
        """Compile for all sizes, after a while, with hosts on these nodes, where settings ask for it; nothing twice."""
        self.end()
        if self._cluster.elastic_programs != "ahead":
            return
        self._ended = threading.Event()
        arguments = sizes, list(nodes), num_pages, self._ended
        threading.Thread(target=self._run, args=arguments, name="programs-ahead", daemon=True).start()

    def end(self) -> None:
        """Give up what is not done, soon."""
        self._ended.set()

    def _run(self, sizes: Sequence[Size], nodes: list[str], num_pages: int, ended: threading.Event) -> None:
        if ended.wait(DELAY_S):
            return
        for size, parts in sizes:
            num_compiled = 0
            for hosts in arrangements(nodes, size.num_hosts):
                if hosts in self._done:
                    continue
                try:
                    num_compiled += self._compile((size, parts), hosts, num_pages=num_pages, ended=ended)
                except GivenUpError:
                    return
                except (RayError, TimeoutError, RuntimeError) as error:
                    log.warning("programs of %d hosts are compiled on loss: %s", size.num_hosts, error)
                    return
                self._done.add(hosts)
            self.num_compiled[size.num_hosts] = num_compiled
            log.info("programs of %d hosts are kept, of which %d were compiled ahead", size.num_hosts, num_compiled)

    def _compile(self, sized: Size, nodes: Sequence[str], *, num_pages: int, ended: threading.Event) -> int:
        """Returns how many programs were compiled; GivenUpError once it has ended."""
        (size, parts), settings = sized, self._settings
        coordinator, address = coordinate(size.num_hosts)
        places = [place_of(host_id, size, cluster=self._cluster, parts=parts) for host_id in range(len(nodes))]
        workers = [_worker_on(node, settings, place) for node, place in zip(nodes, places, strict=True)]
        try:
            calls = [worker.compile.remote(address, num_pages) for worker in workers]
            counts = get(calls, timeout_s=self._cluster.start_timeout_s, given_up=ended)
        finally:
            for worker in workers:
                ray.kill(worker)
            if coordinator is not None:
                coordinator.shutdown()
        return sum(num_programs - num_found for num_programs, num_found in counts)


def arrangements(nodes: Sequence[str], num_hosts: int) -> list[tuple[str, ...]]:
    """Nodes of hosts of a smaller group, in their order, such that each node has every place in one of them."""
    turned = ([*nodes[first:], *nodes[:first]] for first in range(len(nodes)))
    return list(dict.fromkeys(tuple(each[:num_hosts]) for each in turned))


def _worker_on(node: str, settings: RunnerSettings, place: HostPlace) -> ActorHandle:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": strategy}
    return cast(ActorHandle, RemoteAheadWorker.options(**options).remote(settings, place))
