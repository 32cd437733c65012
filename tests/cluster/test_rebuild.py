"""Hosts are lost at random and at named moments: answers are those of one process, on the streams that were open."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from rayserve_moe import Engine
from rayserve_moe.cluster.host_group import HostGroup
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.observability.fault_points import arm, disarm
from rayserve_moe.requests.results import ChoiceResult
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_hosts import assert_same, complete
from tests.cluster.test_weights import send, sent
from tests.support.experts.placements import random_placement

pytestmark = pytest.mark.slow
TIMEOUT_S = 300.0
MANY = {"max_rebuilds_in_10_minutes": 1000, "max_rebuilds_in_hour": 1000, "devices_per_host": 2}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def expected(checkpoint: Path, other_checkpoint: Path) -> dict[Path, list[ChoiceResult]]:
    answers = {}
    with Engine(str(checkpoint), **SETTINGS) as engine:
        for path in (checkpoint, other_checkpoint):
            assert engine.update_weights_from_disk(path, weight_version="0").success
            answers[path] = complete(engine.loop, engine.tokenizer)
    return answers


@pytest.fixture(params=[1, 2], scope="module")
def replica(raylets: int, checkpoint: Path, programs: Path, request: pytest.FixtureRequest) -> Iterator[ReplicaEngine]:
    values = {"model_path": str(checkpoint), "num_hosts": request.param, "compile_cache": programs, **SETTINGS, **MANY}
    engine = start_replica_engine(settings_from(values))
    yield engine
    engine.shutdown()


@pytest.fixture(autouse=True)
def nothing_stays_armed() -> Iterator[None]:
    yield
    disarm()


def pids(engine: ReplicaEngine) -> list[int]:
    return [each.pid for each in ray.get([worker.process.remote() for worker in engine.executor.workers])]


def answers_under(
    engine: ReplicaEngine, fault: Callable[[], object], *, after_steps: int = 3, adapters: Sequence[str] = ("",)
) -> list[ChoiceResult]:
    """What is answered while a fault comes after some steps."""
    begun = engine.loop.statistics()["steps"]
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(complete, engine.loop, engine.tokenizer, adapters=adapters)
        while engine.loop.statistics()["steps"] < begun + after_steps:
            time.sleep(0.001)
        fault()
        return answered.result(TIMEOUT_S)


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped_is_replaced(
    sent: signal.Signals, which: int, replica: ReplicaEngine, expected: dict, checkpoint: Path
) -> None:
    victims = pids(replica)
    found = answers_under(replica, lambda: os.kill(victims[which], sent))
    assert_same(found, expected[checkpoint])
    assert not set(pids(replica)) & set(victims)
    assert_same(complete(replica.loop, replica.tokenizer), expected[checkpoint])


def test_an_error_in_a_step_is_no_loss_of_a_host_and_is_got_over_once(
    replica: ReplicaEngine, expected: dict, checkpoint: Path
) -> None:
    def fail_next(_: object) -> None:
        arm("step", lambda plan: 1 / 0)

    fault = lambda: ray.get(replica.executor.workers[-1].__ray_call__.remote(fail_next))  # noqa: E731
    assert_same(answers_under(replica, fault), expected[checkpoint])


@pytest.mark.parametrize("point", ["group watched", "group compiled"])
def test_a_second_loss_within_a_rebuild_is_got_over(
    point: str, replica: ReplicaEngine, expected: dict, checkpoint: Path
) -> None:
    def kill_one_of(group: HostGroup) -> None:
        os.kill(group._processes[-1].pid, signal.SIGKILL)

    before = replica.loop.recovery.num_rebuilds
    arm(point, kill_one_of)
    victims = pids(replica)
    assert_same(answers_under(replica, lambda: os.kill(victims[0], signal.SIGKILL)), expected[checkpoint])
    assert replica.loop.recovery.num_rebuilds == before + 1


def test_a_host_that_dies_between_joining_and_its_devices_is_got_over(
    replica: ReplicaEngine, expected: dict, checkpoint: Path
) -> None:
    def arm_there(group: HostGroup) -> None:
        die = lambda _: arm("joined", lambda worker: os._exit(1))  # noqa: E731
        ray.get(group.workers[-1].__ray_call__.remote(die))

    arm("group watched", arm_there)
    victims = pids(replica)
    assert_same(answers_under(replica, lambda: os.kill(victims[0], signal.SIGKILL)), expected[checkpoint])


def test_an_update_that_meets_a_loss_is_not_done_and_a_later_one_outlives_its_hosts(
    replica: ReplicaEngine, expected: dict, checkpoint: Path, other_checkpoint: Path
) -> None:
    """A stale share after a rebuild would answer as before the update."""
    loop = replica.loop
    arm("staging", lambda group: os.kill(group._group._processes[-1].pid, signal.SIGKILL))
    outcome = loop.control.update_weights(WeightOrder(str(other_checkpoint), "0")).result(TIMEOUT_S)
    assert not outcome.success and "a host was lost" in outcome.message
    assert_same(complete(loop, replica.tokenizer), expected[checkpoint])
    for path in (other_checkpoint, checkpoint):
        outcome = loop.control.update_weights(WeightOrder(str(path), "0")).result(TIMEOUT_S)
        assert outcome.success, outcome.message
        victims = pids(replica)
        found = answers_under(replica, lambda victims=victims: os.kill(victims[0], signal.SIGKILL))
        assert_same(found, expected[path])


def send_all(engine: ReplicaEngine, path: Path, version: str) -> None:
    outcome = send(engine.loop, sent(path), version)
    assert outcome.success, outcome.message


def assert_kept(engine: ReplicaEngine, expected: list[ChoiceResult]) -> None:
    """Workers are killed under requests, and others answer by the weights that were sent."""
    victims, generation = pids(engine), engine.loop.recovery.generation
    assert_same(answers_under(engine, lambda: os.kill(victims[0], signal.SIGKILL)), expected)
    assert engine.loop.recovery.generation == generation + 1, "at the first try"
    assert_same(complete(engine.loop, engine.tokenizer), expected)


def test_weights_that_were_sent_outlive_their_hosts_and_their_keepers(
    replica: ReplicaEngine, expected: dict, checkpoint: Path, other_checkpoint: Path
) -> None:
    """No disk has them. Two losses, that of a keeper in between, and then others that are sent, or read."""
    keepers = replica.executor.sources.keepers
    send_all(replica, other_checkpoint, "kept")
    assert_kept(replica, expected[other_checkpoint])
    kept = replica.executor.sources.serving.kept
    os.kill(kept[-1].pid, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT_S
    while replica.executor.sources.serving.kept == kept:
        assert time.monotonic() < deadline, "no other keepers"
        time.sleep(0.05)
    assert_kept(replica, expected[other_checkpoint])
    send_all(replica, checkpoint, "sent again")
    assert_kept(replica, expected[checkpoint])
    assert replica.loop.control.update_weights(WeightOrder(str(other_checkpoint), "0")).result(TIMEOUT_S).success
    assert_kept(replica, expected[other_checkpoint])
    assert replica.loop.control.update_weights(WeightOrder(str(checkpoint), "0")).result(TIMEOUT_S).success
    left = [each.__ray_call__.remote(lambda keeper: len(keeper._shares)) for each in keepers.actors.values()]
    assert not any(ray.get(left))


def test_a_share_of_other_weights_is_refused(
    replica: ReplicaEngine, expected: dict, checkpoint: Path, other_checkpoint: Path
) -> None:
    """A keeper that hands out a stale share under the new token, once: the next try has the right one."""
    send_all(replica, other_checkpoint, "stale")
    send_all(replica, checkpoint, "fresh")
    right = replica.executor.sources.serving
    stale = right.kept_at(tuple(place._replace(token="stale") for place in right.kept), right.token)

    def hand_out_the_right_one(_: object) -> None:
        replica.executor.sources.serving = right

    replica.executor.sources.serving = stale
    arm("group watched", hand_out_the_right_one)  # the start under way has been given the other
    generation, victims = replica.loop.recovery.generation, pids(replica)
    assert_same(answers_under(replica, lambda: os.kill(victims[0], signal.SIGKILL)), expected[checkpoint])
    assert replica.loop.recovery.generation > generation + 1


def test_a_pause_outlives_its_hosts(replica: ReplicaEngine, expected: dict, checkpoint: Path) -> None:
    loop, generation = replica.loop, replica.loop.recovery.generation
    loop.control.pause("retract").result(TIMEOUT_S)
    os.kill(pids(replica)[0], signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT_S
    while loop.recovery.generation == generation or loop.recovery.progress is not None:
        assert time.monotonic() < deadline, "the silence is not noticed"
        time.sleep(0.05)
    assert loop.control.is_paused
    loop.control.resume().result(TIMEOUT_S)
    assert_same(complete(loop, replica.tokenizer), expected[checkpoint])


def test_a_step_that_hangs_on_a_host_that_beats_is_a_loss(
    replica: ReplicaEngine, expected: dict, checkpoint: Path
) -> None:
    for _ in range(3):
        complete(replica.loop, replica.tokenizer)  # steps to judge by

    def hang_next(_: object) -> None:
        arm("step", lambda plan: threading.Event().wait())

    fault = lambda: ray.get(replica.executor.workers[0].__ray_call__.remote(hang_next))  # noqa: E731
    assert_same(answers_under(replica, fault), expected[checkpoint])


def test_experts_go_back_to_where_they_were_headed(raylets: int, checkpoint: Path, programs: Path) -> None:
    """The last placement, believed of hosts that have just started, would send tokens to other experts."""
    eplb = {"enable_eplb": True, "num_redundant_experts": 4, "expert_backend": "all_to_all", "data_parallel_size": 2}
    values = {"model_path": str(checkpoint), "num_hosts": 2, "compile_cache": programs, **SETTINGS, **MANY, **eplb}
    engine = start_replica_engine(settings_from({**values, "eplb_interval": 1_000_000}))
    try:
        wanted = complete(engine.loop, engine.tokenizer)
        migration = engine.loop.eplb.migration
        target = random_placement(migration.placement, 3)
        engine.loop.eplb.set_target(target)
        victims = pids(engine)
        for _ in range(3):
            assert_same(complete(engine.loop, engine.tokenizer), wanted)
        found = answers_under(engine, lambda: os.kill(victims[1], signal.SIGKILL))
        assert_same(found, wanted)
        for _ in range(5):
            assert_same(complete(engine.loop, engine.tokenizer), wanted)
        assert migration.target is target
        assert send(engine.loop, sent(checkpoint), "where experts lie now").success
        victims = pids(engine)
        assert_same(answers_under(engine, lambda: os.kill(victims[0], signal.SIGKILL)), wanted)
        assert migration.placement is target, "they need not move again"
        for _ in range(3):
            assert_same(complete(engine.loop, engine.tokenizer), wanted)
        assert_another_starts_with_the_same(engine, values, wanted)
    finally:
        engine.shutdown()


def assert_another_starts_with_the_same(engine: ReplicaEngine, values: dict, wanted: list[ChoiceResult]) -> None:
    """Another replica takes what was sent, and where experts lie, from the keepers of this one, and outlives it."""
    offered = engine.offered_weights()
    assert offered is not None and offered.version == "where experts lie now"
    other = start_replica_engine(settings_from(values), weights=offered)
    try:
        assert other.loop.card.weight_version == offered.version
        assert_same(complete(other.loop, other.tokenizer), wanted)
        engine.shutdown()
        victims = pids(other)
        assert_same(answers_under(other, lambda: os.kill(victims[0], signal.SIGKILL)), wanted)
    finally:
        other.shutdown()


@pytest.mark.parametrize("are_sent", [False, True])
def test_a_lost_node_is_replaced_by_a_spare_one(
    are_sent: bool, cluster: Cluster, checkpoint: Path, other_checkpoint: Path, programs: Path, expected: dict
) -> None:
    """The raylet is killed, and with it the worker that it holds; only larger nodes than the others will do.

    What was sent no disk has: another node has the share of the one that is lost.
    """
    nodes = [cluster.add_node(num_cpus=3) for _ in range(2)]
    values = {"model_path": str(checkpoint), "num_hosts": 2, "compile_cache": programs, **SETTINGS, **MANY}
    engine = start_replica_engine(settings_from({**values, "cpus_per_host": 3, "keep_next_weights": are_sent}))
    path = other_checkpoint if are_sent else checkpoint
    try:
        for lost in (1, 0):
            if are_sent and lost == 1:
                send_all(engine, path, "sent")
            deadline = time.monotonic() + TIMEOUT_S
            while are_sent and len(engine.executor.sources.offered) < 4:
                assert time.monotonic() < deadline, "the next hosts copy nothing"
                time.sleep(0.05)
            nodes.append(cluster.add_node(num_cpus=3))
            found = answers_under(engine, lambda lost=lost: cluster.remove_node(nodes.pop(lost), allow_graceful=False))
            assert_same(found, expected[path])
    finally:
        engine.shutdown()
        for node in nodes:
            cluster.remove_node(node)
