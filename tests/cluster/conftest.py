"""A real Ray cluster of several raylets on this machine, and what the cluster tests compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from rayserve_moe.checkpoints.synthetic import ensure_checkpoint
from rayserve_moe.cluster import host_group

TIMEOUT_S = 300.0
SETTINGS = {
    "max_model_len": 256,
    "num_pages": 80,
    "max_running_requests": 4,
    "max_step_tokens": 32,  # with one size of decode steps, two programs: every host compiles them anew
    "structured_output": False,
    "precompile_bs_paddings": [4],
    "enable_return_routed_experts": True,
    "dtype": "float32",
}


@pytest.fixture(scope="package", autouse=True)
def a_slow_machine_is_no_loss() -> Iterator[None]:
    """A host that shares two cores with all other tests is silent for seconds at times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_group, "SILENCE_S", 30.0)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "tiny", dtype="float32")


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the same model."""
    return ensure_checkpoint(tmp_path_factory.mktemp("checkpoints") / "other", "tiny", dtype="float32", seed=1)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where groups of two hosts keep their programs: nowhere before the first of them."""
    return tmp_path_factory.mktemp("programs")


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for what can take minutes on a slow machine; `what` says what has not come of it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def started_cluster() -> Cluster:
    """A head and one more raylet, for which Ray waits 30 s and no longer: a slow machine has taken that."""
    head = {"num_cpus": 2, "include_dashboard": False, "dashboard_port": None}
    for may_fail in (True, True, False):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=2)
            return cluster
        except Exception as error:  # Ray has no type of its own for it
            cluster.shutdown()
            if not may_fail or "timed out during startup" not in str(error):
                raise
    raise AssertionError("the last try returns or raises")


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A head and one more raylet."""
    cluster = started_cluster()
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="package")
def raylets(cluster: Cluster) -> int:
    """How many raylets the cluster has."""
    return 2
