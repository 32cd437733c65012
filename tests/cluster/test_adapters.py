"""Adapters on two hosts, merged or beside the weights: hosts that are killed meanwhile or later change no answer."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.adapters.directory import NO_ADAPTER, adapter_body
from rayserve_moe.checkpoints.bucket import SentAdapter, read_bucket
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.updates.adapters import adapter_order
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.observability.fault_points import arm, disarm
from rayserve_moe.requests.results import ChoiceResult
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_hosts import assert_same, complete
from tests.cluster.test_rebuild import MANY, TIMEOUT_S, answers_under, pids
from tests.support.checkpoints.adapters import MadeAdapter, make_adapter, make_adapter_beside

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(checkpoint: Path) -> MadeAdapter:
    return make_adapter(checkpoint, "shared_outer")


@pytest.fixture(scope="module")
def expected(
    checkpoint: Path, made: MadeAdapter, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[ChoiceResult], list[ChoiceResult]]:
    """Answers of one process with the base checkpoint, then with the merged checkpoint."""
    merged = made.write_merged(checkpoint, tmp_path_factory.mktemp("merged") / "model")
    with Engine(str(checkpoint), **SETTINGS) as engine:
        base = complete(engine.loop, engine.tokenizer)
        assert engine.update_weights_from_disk(merged, weight_version="0").success
        return base, complete(engine.loop, engine.tokenizer)


@pytest.fixture
def replica(raylets: int, checkpoint: Path) -> Iterator[ReplicaEngine]:
    engine = start_replica_engine(settings_from({"model_path": str(checkpoint), "num_hosts": 2, **SETTINGS, **MANY}))
    yield engine
    disarm()
    engine.shutdown()


def load(replica: ReplicaEngine, body: bytes | bytearray, name: str) -> WeightOutcome:
    order = adapter_order(name, weight_version="0")
    return replica.loop.control.tensors.stage(read_bucket(body), order).result(TIMEOUT_S)


def test_an_adapter_outlives_its_hosts_and_its_directory(
    replica: ReplicaEngine, made: MadeAdapter, expected: tuple[list, list], tmp_path: Path
) -> None:
    base, merged = expected
    directory = made.write(tmp_path / "adapter")
    body = adapter_body(str(directory))
    victims = pids(replica)
    arm("merging", lambda _: os.kill(victims[-1], signal.SIGKILL))
    outcome = load(replica, body, "a")
    assert not outcome.success and "a host was lost" in outcome.message
    assert replica.loop.control.adapter == ""
    assert_same(complete(replica.loop, replica.tokenizer), base)
    outcome = load(replica, body, "a")
    assert outcome.success and outcome.max_rounding, outcome.message
    assert_same(complete(replica.loop, replica.tokenizer), merged)
    shutil.rmtree(directory)
    victims = pids(replica)
    assert_same(answers_under(replica, lambda: os.kill(victims[0], signal.SIGKILL)), merged)
    assert victims[0] not in pids(replica)
    assert load(replica, NO_ADAPTER, "").success
    assert replica.loop.control.adapter == ""
    assert_same(complete(replica.loop, replica.tokenizer), base)


BESIDE = {"max_loras": 2, "max_lora_rank": 4}
NAMES = ("x", "", "y")


def test_adapters_beside_the_weights_are_given_to_the_hosts_that_replace_others(
    raylets: int, checkpoint: Path, tmp_path: Path
) -> None:
    paths = {
        name: make_adapter_beside(checkpoint, seed=seed).write(tmp_path / name) for seed, name in enumerate(("x", "y"))
    }
    with Engine(str(checkpoint), **SETTINGS, **BESIDE) as engine:
        for name, path in paths.items():
            assert engine.load_lora_adapter(path, lora_name=name).success
        expected = complete(engine.loop, engine.tokenizer, adapters=NAMES)
    given = {"model_path": str(checkpoint), "num_hosts": 2, **SETTINGS, **MANY, **BESIDE}
    replica = start_replica_engine(settings_from(given))
    try:
        loads = replica.loop.control.adapters
        assert loads is not None
        for name, path in paths.items():
            adapter = read_bucket(adapter_body(str(path)))
            assert isinstance(adapter, SentAdapter)
            outcome = loads.load(adapter, name).result(TIMEOUT_S)
            assert outcome.success, outcome.message
            shutil.rmtree(path)
        assert_same(complete(replica.loop, replica.tokenizer, adapters=NAMES), expected)
        victims = pids(replica)
        found = answers_under(replica, lambda: os.kill(victims[-1], signal.SIGKILL), adapters=NAMES)
        assert_same(found, expected)
        assert not set(pids(replica)) & set(victims)
    finally:
        replica.shutdown()
