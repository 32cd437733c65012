"""Hosts that stay away are done without, and serve again once they are back: requests outlive both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rayserve_moe import Engine
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.requests.results import ChoiceResult
from tests.cluster.conftest import SETTINGS, until
from tests.cluster.test_hosts import assert_same, complete
from tests.cluster.test_rebuild import pids, send_all

pytestmark = pytest.mark.slow
TIMEOUT_S = 300.0
CPUS = 5
"""Of a node of these tests alone: no other node of the cluster will do for its hosts."""
ELASTIC = {"elastic_after_s": 1.0, "cpus_per_host": CPUS, "devices_per_host": 1, "max_rebuilds_in_10_minutes": 1000}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[ChoiceResult]:
    with Engine(str(checkpoint), **SETTINGS) as engine:
        return complete(engine.loop, engine.tokenizer)


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[list]:
    """Nodes with place for a host each; a test may lose some."""
    nodes = []
    yield nodes
    for node in nodes:
        cluster.remove_node(node)


class Load:
    """Requests that follow each other while hosts go and come; `answers` are all that was answered."""

    def __init__(self, engine: ReplicaEngine) -> None:
        self.answers: list[list[ChoiceResult]] = []
        self._engine, self._is_over = engine, False
        self._pool = ThreadPoolExecutor(1)
        self._done: Future[None] = self._pool.submit(self._run)

    def _run(self) -> None:
        while not self._is_over:
            self.answers.append(complete(self._engine.loop, self._engine.tokenizer))

    def end(self) -> None:
        self._is_over = True
        self._done.result(TIMEOUT_S)
        self._pool.shutdown()


def started(checkpoint: Path, programs: Path, num_hosts: int, **more: Any) -> ReplicaEngine:
    """A group of hosts that may do without one of them."""
    values = {**SETTINGS, **ELASTIC, "num_hosts": num_hosts, "data_parallel_size": num_hosts, **more}
    return start_replica_engine(settings_from({"model_path": str(checkpoint), "compile_cache": programs, **values}))


@pytest.mark.parametrize(
    ("num_hosts", "eplb"),
    [(2, {}), (4, {"enable_eplb": True, "eplb_interval": 32, "eplb_window": 64, "expert_backend": "all_to_all"})],
)
def test_a_lost_host_is_done_without_and_serves_again_once_it_is_back(
    num_hosts: int,
    eplb: dict,
    cluster: Cluster,
    nodes: list,
    checkpoint: Path,
    tmp_path: Path,
    expected: list[ChoiceResult],
) -> None:
    """4 experts on 3 hosts: slots are added until they divide."""
    nodes += [cluster.add_node(num_cpus=CPUS) for _ in range(num_hosts)]
    engine = started(checkpoint, tmp_path, num_hosts, **eplb)
    loop = engine.loop
    try:
        load = Load(engine)
        until(lambda: len(load.answers) > 0, "nothing is answered")
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        until(lambda: loop.statistics()["hosts_missing"] == 1, "the host is not done without")
        seen = len(load.answers)
        until(lambda: len(load.answers) > seen + 1, "fewer hosts do not serve")
        placement, first = loop.eplb.migration.placement, engine.executor.layout.placement
        assert placement.ep_size == num_hosts - 1
        assert first is (loop.eplb.first if eplb else None), "hosts load experts where the engine takes them to be"
        loop.check_integrity()
        nodes.append(cluster.add_node(num_cpus=CPUS))
        until(lambda: loop.statistics()["hosts_missing"] == 0, "the host does not come back")
        seen = len(load.answers)
        until(lambda: len(load.answers) > seen + 1, "all hosts do not serve")
        load.end()
        assert loop.eplb.migration.placement.ep_size == num_hosts
        assert loop.recovery.num_rebuilds == 2
        for answers in load.answers:
            assert_same(answers, expected)
        loop.check_integrity()
    finally:
        engine.shutdown()


def programs_of(engine: ReplicaEngine) -> list[tuple[int, int]]:
    """Of each host, how many programs it has, and how many of them it found on disk."""
    reports = [worker.__ray_call__.remote(lambda worker: worker._runner._report) for worker in engine.executor.workers]
    return [(report.num_programs, report.num_programs_found) for report in ray.get(reports)]


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_group_compiles_its_programs_when_it_first_shrinks(
    num_hosts: int,
    cluster: Cluster,
    nodes: list,
    checkpoint: Path,
    tmp_path: Path,
    expected: list[ChoiceResult],
) -> None:
    nodes += [cluster.add_node(num_cpus=CPUS) for _ in range(num_hosts)]
    engine = started(checkpoint, tmp_path, num_hosts)
    try:
        load = Load(engine)
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        until(lambda: engine.loop.statistics()["hosts_missing"] == 1, "the host is not done without")
        seen = len(load.answers)
        until(lambda: len(load.answers) > seen + 1, "fewer hosts do not serve")
        load.end()
        for num_programs, num_found in programs_of(engine):
            assert num_programs > 0 and num_found == 0
        for answers in load.answers:
            assert_same(answers, expected)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_that_are_left_take_sent_weights_of_a_lost_one_from_its_neighbour(
    num_hosts: int, cluster: Cluster, nodes: list, checkpoint: Path, other_checkpoint: Path, tmp_path: Path
) -> None:
    """No disk has them. Fewer hosts keep them then, as fewer shares, which outlive a worker, and the host's return."""
    with Engine(str(other_checkpoint), **SETTINGS) as one:
        expected = complete(one.loop, one.tokenizer)
    nodes += [cluster.add_node(num_cpus=CPUS) for _ in range(num_hosts)]
    engine = started(checkpoint, tmp_path, num_hosts, keep_next_weights=True)
    loop, sources = engine.loop, engine.executor.sources
    recovery = loop.recovery
    try:
        send_all(engine, other_checkpoint, "sent")
        until(lambda: len(sources.offered) == 2 * num_hosts, "the next hosts copy nothing")
        load = Load(engine)
        until(lambda: len(load.answers) > 0, "nothing is answered")
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        until(lambda: loop.statistics()["hosts_missing"] == 1, "the host is not done without")
        seen = len(load.answers)
        until(lambda: len(load.answers) > seen + 1, "fewer hosts do not serve")
        assert len(sources.serving.kept) == num_hosts - 1 and not sources.serving.offered
        os.kill(pids(engine)[0], signal.SIGKILL)
        until(lambda: recovery.num_rebuilds == 2 and recovery.progress is None, "the worker is not replaced")
        nodes.append(cluster.add_node(num_cpus=CPUS))
        until(lambda: loop.statistics()["hosts_missing"] == 0, "the host does not come back")
        seen = len(load.answers)
        until(lambda: len(load.answers) > seen + 1, "all hosts do not serve")
        load.end()
        assert len(sources.serving.kept) == num_hosts
        for answers in load.answers:
            assert_same(answers, expected)
        loop.check_integrity()
    finally:
        engine.shutdown()


def test_sent_weights_that_went_with_a_lost_host_end_the_replica_soon(
    cluster: Cluster, nodes: list, checkpoint: Path, other_checkpoint: Path, tmp_path: Path
) -> None:
    """Nobody else had the share: fewer hosts do not answer by parts of the weights, nor by those of before."""
    nodes += [cluster.add_node(num_cpus=CPUS) for _ in range(2)]
    engine = started(checkpoint, tmp_path, 2)
    try:
        send_all(engine, other_checkpoint, "sent")
        complete(engine.loop, engine.tokenizer)
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        until(engine.loop.has_failed.done, "it waits for what does not come back")
    finally:
        engine.shutdown()
