"""Weights that were sent, and are lost with all that had them, are named until others are pushed; no others answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from safetensors.numpy import load_file

from benchmarks.host_memory import sealed_shares
from rayserve_moe.checkpoints.bucket import SentTensor, write_bucket
from rayserve_moe.observability.fault_points import arm
from rayserve_moe.serving.app import build
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_fleet import ASK, WITHIN_S
from tests.support.cluster.ports import free_port
from tests.support.serving.http_client import wait_until

pytestmark = pytest.mark.slow
PORT = free_port()


@pytest.fixture(scope="module")
def deploy(raylets: int, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Deploys a lone replica, again with other arguments."""
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    settings = {"compile_cache": str(tmp_path_factory.mktemp("programs")), "served_model_name": "tiny", **SETTINGS}

    def deploy(**more: Any) -> None:
        serve.run(build({"model_path": str(checkpoint), **settings, **more}), name="moe")

    yield deploy
    serve.shutdown()


@pytest.fixture
def replica(deploy: Callable[..., None]) -> Iterator[httpx.Client]:
    deploy()
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
        yield client


def processes_of(cluster: Cluster, name: str) -> list[int]:
    """Actors of this cluster, by the name of their class; other clusters may run on this machine."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in raylets and (folder / "cmdline").read_bytes().startswith(f"ray::{name}".encode()):
                found.append(int(folder.name))
        except (OSError, ProcessLookupError):
            continue
    return found


def kill(cluster: Cluster, *names: str) -> None:
    victims = [pid for name in names for pid in processes_of(cluster, name)]
    assert len(victims) == len(names)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def answered(client: httpx.Client) -> tuple[list[int], str]:
    answer = client.post("/generate", json=ASK).raise_for_status().json()
    return answer["output_ids"], answer["meta_info"]["weight_version"]


def push(client: httpx.Client, path: Path, version: str, *, update_id: str) -> None:
    tensors = [SentTensor(*each) for each in load_file(path / "model.safetensors").items()]
    sent = client.post(
        "/update_weights_from_tensor",
        params={"update_id": update_id, "last": True, "weight_version": version},
        content=b"".join(map(bytes, write_bucket(tensors))),
        headers={"content-type": "application/vnd.safetensors"},
    )
    assert sent.status_code == 200 and sent.json()["success"], sent.text


def code_of(client: httpx.Client, path: str) -> str | None:
    """The code of an error answer; None of any other answer, or none."""
    try:
        found = client.get(path)
        return found.json()["error"]["code"] if found.status_code == 503 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None


def assert_awaited(client: httpx.Client, version: str) -> None:
    """The replica comes to name what has to be pushed, and answers nothing by other weights meanwhile."""

    def is_awaited() -> bool:
        try:
            by = client.post("/generate", json=ASK)
        except httpx.HTTPError:
            return False
        assert by.status_code != 200 or by.json()["meta_info"]["weight_version"] == version, by.text
        return code_of(client, "/ready") == "weights_lost"

    wait_until(is_awaited, within_s=WITHIN_S)
    asked = client.get("/ready"), client.post("/generate", json=ASK)
    for answer in asked:
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert f"weights {version} were lost" in answer.json()["error"]["message"]
    assert client.get("/health").json() == {"status": "ok", "weights_awaited": version}


def test_a_worker_that_is_lost_with_the_keeper_of_its_share(
    replica: httpx.Client, cluster: Cluster, other_checkpoint: Path
) -> None:
    before = answered(replica)
    push(replica, other_checkpoint, "sent a", update_id="1")
    wanted = answered(replica)
    assert wanted[0] != before[0]
    kill(cluster, "WeightKeeper", "HostWorker")
    assert_awaited(replica, "sent a")
    push(replica, other_checkpoint, "sent a", update_id="2")
    assert replica.get("/ready").status_code == 200 and answered(replica) == wanted


def on_replica(call: Callable[[Any], object]) -> None:
    """Call a function there with the replica's own object, once the one before it has ended."""

    def names() -> list[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        return [each["name"] for each in actors if each["name"].startswith("SERVE_REPLICA::moe#moe-server#")]

    wait_until(lambda: len(names()) == 1, within_s=WITHIN_S)
    ray.get(ray.get_actor(names()[0], namespace="serve").__ray_call__.remote(call))


def test_a_worker_that_is_lost_between_a_swap_and_its_copy(
    replica: httpx.Client, deploy: Callable[..., None], cluster: Cluster, other_checkpoint: Path
) -> None:
    """What the update came from is its sender, who alone has these weights then. Once they are kept no loss matters."""

    def kill_workers_there(_: object) -> None:
        def kill_all(sources: Any) -> None:
            for worker in sources._workers():
                os.kill(ray.get(worker.process.remote()).pid, signal.SIGKILL)

        arm("keeping", kill_all)

    deploy(keep_sent_weights="after_swap")
    on_replica(kill_workers_there)
    push(replica, other_checkpoint, "sent d", update_id="1")
    assert_awaited(replica, "sent d")
    push(replica, other_checkpoint, "sent d", update_id="2")
    wanted = answered(replica)
    wait_until(lambda: len(sealed_shares(processes_of(cluster, "WeightKeeper"))) == 1, within_s=WITHIN_S)
    kill(cluster, "HostWorker")
    wait_until(lambda: code_of(replica, "/ready") is None, within_s=WITHIN_S)
    assert answered(replica) == wanted


def test_a_lone_replica_that_is_lost_and_a_deployment_that_follows_it(
    replica: httpx.Client, deploy: Callable[..., None], cluster: Cluster, checkpoint: Path, other_checkpoint: Path
) -> None:
    """Lost once more before anything is pushed, it awaits the same. Read from a disk, weights serve again; other
    arguments of the deployment are another beginning."""
    push(replica, other_checkpoint, "sent b", update_id="1")
    wanted = answered(replica)
    for _ in range(2):
        kill(cluster, "ServeReplica:moe:")
        assert_awaited(replica, "sent b")
    update = {"model_path": str(other_checkpoint), "weight_version": "sent b"}
    assert replica.post("/update_weights_from_disk", json=update).json()["success"]
    assert replica.get("/ready").status_code == 200 and answered(replica) == wanted
    push(replica, other_checkpoint, "sent c", update_id="2")
    kill(cluster, "ServeReplica:moe:")
    assert_awaited(replica, "sent c")
    deploy(served_model_name="another")
    wait_until(lambda: code_of(replica, "/ready") is None, within_s=WITHIN_S)
    assert replica.get("/ready").status_code == 200
    ids, version = answered(replica)
    assert version != "sent c" and ids != wanted[0]
