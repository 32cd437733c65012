"""Two replicas of one application over real Serve: they answer alike, and control is for both, through faults too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from ray.serve.context import _get_global_client
from safetensors.numpy import load_file

from benchmarks.resuming_client import ResumingClient
from rayserve_moe import extract_routed_experts_from_meta_info
from rayserve_moe.checkpoints.bucket import SentTensor
from rayserve_moe.fleet.broadcast import listed_replicas
from rayserve_moe.rollouts.answers import Refused
from rayserve_moe.rollouts.ray_weights import Server, shares_for, update_weights_over_ray
from tests.cluster.conftest import SETTINGS
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.serving.http_client import wait_until
from tests.support.serving.journal_server import KEY, OwnJournal

PORT = free_port()
WITHIN_S = 300.0
ASK = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}


@pytest.fixture(scope="module")
def journal() -> Iterator[OwnJournal]:
    journal = OwnJournal()
    yield journal
    journal.end()


@pytest.fixture(scope="module")
def fleet(raylets: int, checkpoint: Path, journal: OwnJournal) -> Iterator[httpx.Client]:
    settings = {**SETTINGS, "num_replicas": 2, "cpus_per_host": 0.25}
    settings |= {"journal": "on", "journal_address": f"127.0.0.1:{journal.port}", "journal_key": KEY.decode()}
    with deployed(checkpoint, settings, port=PORT) as client:
        yield client


def running() -> list[str]:
    return sorted(name for name, state in listed_replicas("moe", "moe-server").items() if state == "RUNNING")


def answered(client: httpx.Client) -> set[tuple[tuple[int, ...], str]]:
    """Answers and versions of several connections, which reach both replicas."""
    found = set()
    for _ in range(8):
        answer = client.post("/generate", json=ASK).json()
        found.add((tuple(answer["output_ids"]), answer["meta_info"]["weight_version"]))
    return found


def info(client: httpx.Client) -> dict[str, Any]:
    return client.get("/server_info").json()


def is_whole(client: httpx.Client) -> bool:
    """Whether both replicas answer for the fleet: an error answer while one is lost."""
    return len(info(client).get("replicas", ())) == 2


def process_of(replica: str) -> int:
    client = _get_global_client()
    replicas = client.get_serve_details()["applications"]["moe"]["deployments"]["moe-server"]["replicas"]
    return next(one["pid"] for one in replicas if one["replica_id"] == replica)


@pytest.mark.slow
def test_both_replicas_answer_alike_and_follow_one_order(fleet, checkpoint, other_checkpoint):
    assert sorted(info(fleet)["replicas"]) == running() and len(running()) == 2
    (before,) = answered(fleet)
    assert fleet.post("/pause_generation", json={}).status_code == 200
    assert [load["paused"] for load in fleet.get("/v1/loads").json()["loads"]] == [True, True]
    update = {"model_path": str(other_checkpoint), "weight_version": "1"}
    assert fleet.post("/update_weights_from_disk", json=update).json()["success"]
    assert fleet.post("/continue_generation").status_code == 200
    (after,) = answered(fleet)
    assert after[0] != before[0] and after[1] == "1"
    back = {"model_path": str(checkpoint), "weight_version": before[1]}
    assert fleet.post("/update_weights_from_disk", json=back).json()["success"] and answered(fleet) == {before}


@pytest.mark.slow
def test_both_replicas_take_weights_from_a_trainer_of_the_cluster(fleet, checkpoint, other_checkpoint):
    (before,) = answered(fleet)
    update = {"model_path": str(other_checkpoint), "weight_version": "read"}
    assert fleet.post("/update_weights_from_disk", json=update).json()["success"]
    ((wanted, _),) = answered(fleet)
    back = {"model_path": str(checkpoint), "weight_version": "back"}
    assert fleet.post("/update_weights_from_disk", json=back).json()["success"]
    params, others = (load_file(path / "model.safetensors") for path in (checkpoint, other_checkpoint))
    sent = update_weights_over_ray(others, weight_version="shared", app="moe", bucket_bytes=10_000)
    assert answered(fleet) == {(wanted, "shared")}
    assert sent["sent_bytes"] == {name: [sum(values.nbytes for values in others.values())] for name in running()}
    changed = {**others, "lm_head.weight": others["lm_head.weight"] * np.float32(1 + 2**-20)}
    delta = update_weights_over_ray(changed, weight_version="delta", app="moe", base=others)
    assert all(0 < sum(each) <= 2 * others["lm_head.weight"].nbytes for each in delta["sent_bytes"].values())
    update_weights_over_ray(params, weight_version=before[1], app="moe")
    assert answered(fleet) == {before}
    with pytest.raises(Refused, match=r"no tensor model\.x"):
        update_weights_over_ray({"model.x": np.zeros(3, np.float32)}, weight_version="wrong", app="moe")
    assert answered(fleet) == {before}


@pytest.mark.slow
def test_a_trainer_that_is_killed_between_two_buckets_changes_nothing(fleet, other_checkpoint):
    (before,) = answered(fleet)
    name = next(iter(load_file(other_checkpoint / "model.safetensors")))

    @ray.remote(num_cpus=0, max_restarts=0)
    class Trainer:
        def send_half(self) -> bool:
            values = load_file(other_checkpoint / "model.safetensors")[name]
            server, bucket = Server("moe"), [SentTensor(name, values)]
            wanted = server.call("wanted", "half", 0, [(name, values.shape)], None)
            return server.call("stage", "half", 0, shares_for(bucket, wanted), None).success

    trainer = Trainer.remote()
    assert ray.get(trainer.send_half.remote())
    ray.kill(trainer)
    assert answered(fleet) == {before}
    update_weights_over_ray(load_file(other_checkpoint / "model.safetensors"), weight_version="after", app="moe")
    ((_, version),) = answered(fleet)
    assert version == "after"


@pytest.mark.slow
def test_a_trainer_that_is_interrupted_between_two_buckets_leaves_nothing_staged(fleet, other_checkpoint, monkeypatch):
    """Every replica drops the update at once, not after its timeout of ten minutes for the next bucket."""
    before, call, staged = answered(fleet), Server.call, []
    sent = load_file(other_checkpoint / "model.safetensors")

    def interrupted(server: Server, name: str, *arguments: Any) -> Any:
        if name == "stage":
            if staged:
                raise KeyboardInterrupt
            staged.append(arguments)
        return call(server, name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Server, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            update_weights_over_ray(sent, weight_version="never", app="moe", bucket_bytes=10_000)
    ((update_id, _, shares, _),) = staged
    with pytest.raises(Refused, match="this update has ended"):
        Server("moe").call("stage", update_id, 1, shares, None)
    assert answered(fleet) == before


@pytest.mark.slow
def test_a_replica_that_starts_after_weights_were_sent_takes_them_from_another(fleet, checkpoint, other_checkpoint):
    """No disk has them. Then both are lost, one after the other: the last that had them from the trainer goes too."""
    update_weights_over_ray(load_file(other_checkpoint / "model.safetensors"), weight_version="sent", app="moe")
    (wanted,) = answered(fleet)
    for lost in running():
        os.kill(process_of(lost), signal.SIGKILL)
        wait_until(lambda lost=lost: len(running()) == 2 and lost not in running(), within_s=WITHIN_S)
        wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
        assert answered(fleet) == {wanted}
    back = {"model_path": str(checkpoint), "weight_version": "back"}
    assert fleet.post("/update_weights_from_disk", json=back).json()["success"]
    assert {version for _, version in answered(fleet)} == {"back"}


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
def test_a_replica_that_is_killed_during_an_update_comes_back_with_what_was_decided(fleet, other_checkpoint, delay_s):
    wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
    lost = running()[0]
    name = f"killed-{delay_s}"
    killing = threading.Timer(delay_s, os.kill, (process_of(lost), signal.SIGKILL))
    killing.start()
    update = {"model_path": str(other_checkpoint), "weight_version": name}
    answer = None
    with suppress(httpx.HTTPError):  # it may be the one that is asked
        answer = fleet.post("/update_weights_from_disk", json=update)
    wait_until(lambda: len(running()) == 2 and lost not in running(), within_s=WITHIN_S)
    wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
    found = fleet.get("/get_weight_version").json()
    assert found["agree"], found
    if answer is not None and answer.status_code == 200:
        assert answer.json()["success"] and found["weight_version"] == name
    assert len(answered(fleet)) == 1


@pytest.mark.slow
def test_a_replica_that_hangs_is_named_and_follows_when_it_goes_on(fleet, other_checkpoint):
    wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
    stopped = running()[0]
    pid = process_of(stopped)
    os.kill(pid, signal.SIGSTOP)
    try:
        found = [httpx_or_none(fleet) for _ in range(4)]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert any(one is not None and one.get("missing") == [stopped] for one in found), found
    wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)


def asked(number: int, *, name: str) -> dict[str, Any]:
    """A request of the sixteen: even ones are streams."""
    sampling = {"max_new_tokens": 180 + number, "temperature": 0, "ignore_eos": True, "frequency_penalty": 0.5}
    parts = {"return_logprob": True, "return_routed_experts": True, "stream": number % 2 == 0}
    return {"input_ids": [5, 6, 7 + number], "sampling_params": sampling, "rid": f"{name} {number}", **parts}


def num_requests(client: httpx.Client) -> dict[str, int]:
    """By replica, in progress."""
    loads = client.get("/v1/loads").json()["loads"]
    return {load["replica"]: load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads}


def seen(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    rows = extract_routed_experts_from_meta_info(answer).tolist()
    return answer["output_ids"], answer["text"], meta["finish_reason"], meta["weight_versions"], rows


@pytest.mark.slow
def test_a_replica_that_is_killed_under_requests_loses_none_of_them(fleet):
    check_a_loss(fleet, asked, url=f"http://127.0.0.1:{PORT}", tolerance=1e-5)


def check_a_loss(
    fleet: httpx.Client, asked: Callable[..., dict[str, Any]], *, url: str, tolerance: float, killed_at: int = 1
) -> None:
    """Kill the replica of most of sixteen requests when a stream has told `killed_at` tokens.

    All come to what they do undisturbed; log-probs differ by the tolerance at most.
    """
    wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
    client = ResumingClient(url, within_s=WITHIN_S, begins_at=killed_at)
    with ThreadPoolExecutor(16) as threads:
        wanted = list(threads.map(client.ask, [asked(number, name="undisturbed") for number in range(16)]))
        assert client.num_cut == 0
        assert fleet.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        client.has_begun.clear()
        found = [threads.submit(client.ask, asked(number, name="killed")) for number in range(16)]
        wait_until(lambda: sum(num_requests(fleet).values()) == 16)
        counts = num_requests(fleet)
        lost = max(counts, key=counts.__getitem__)
        pid = process_of(lost)
        assert fleet.post("/continue_generation").status_code == 200
        assert client.has_begun.wait(WITHIN_S)
        os.kill(pid, signal.SIGKILL)
        answers = [one.result() for one in found]
    for one, other in zip(answers, wanted, strict=True):
        assert seen(one) == seen(other)
        values = [[entry[0] for entry in each["meta_info"]["output_token_logprobs"]] for each in (one, other)]
        np.testing.assert_allclose(*values, rtol=0, atol=tolerance)
    assert client.num_resumed >= 1
    wait_until(lambda: len(running()) == 2 and lost not in running(), within_s=WITHIN_S)
    wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)


def httpx_or_none(client: httpx.Client) -> dict[str, Any] | None:
    try:
        return client.get("/v1/loads", timeout=15).json()
    except httpx.HTTPError:
        return None


@pytest.mark.slow
def test_a_replica_that_starts_later_has_weights_and_pause_of_the_others(fleet, other_checkpoint):
    update = {"model_path": str(other_checkpoint), "weight_version": "later"}
    assert fleet.post("/update_weights_from_disk", json=update).json()["success"]
    assert fleet.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    lost = running()[0]
    os.kill(process_of(lost), signal.SIGKILL)
    wait_until(lambda: len(running()) == 2 and lost not in running(), within_s=WITHIN_S)
    wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
    assert all(load["paused"] for load in fleet.get("/v1/loads").json()["loads"])
    assert fleet.get("/get_weight_version").json()["agree"]
    assert fleet.post("/continue_generation").status_code == 200
    ((_, version),) = answered(fleet)
    assert version == "later"
