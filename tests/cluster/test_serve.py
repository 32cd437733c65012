"""The Serve application as its users meet it: deployed, asked over HTTP, idle, and after a fault."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import httpx
import pytest
import ray
from ray._private import worker
from ray.util import list_named_actors

from rayserve_moe import extract_routed_experts_from_meta_info
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.serving.app import build
from tests.cluster.conftest import SETTINGS
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port

PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"
IDLE_SECONDS = 2.0
AT_ONCE_S = 10.0
LOG_FILES = {"replica": "logs/serve/replica_moe_*.log", "worker": "logs/worker-*.err"}
ACTORS = ("ray::HostWorker", "ray::ServeReplica:moe:", "ray::DAGDriverProxyActor")


@pytest.fixture(scope="module")
def foreign() -> set[int]:
    """Processes of other servers on this machine, which are none of this test's business."""
    return set(pids_of(*ACTORS))


@pytest.fixture(scope="module")
def app(foreign: set[int], raylets: int, checkpoint: Path) -> Iterator[httpx.Client]:
    with deployed(checkpoint, {**SETTINGS, "idle_release_s": 0.3, "log_format": "json"}, port=PORT) as client:
        yield client


def complete(client: httpx.Client, max_tokens: int = 6) -> httpx.Response:
    body = {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_routed_experts": True,
    }
    return client.post("/v1/completions", json=body)


def test_completion_carries_routing(app: httpx.Client) -> None:
    answer = complete(app).json()
    (choice,) = answer["choices"]
    generated = answer["usage"]["completion_tokens"]
    assert choice["meta_info"]["routed_experts_info"]["shape"] == [3 + generated - 1, 4, 2]
    assert extract_routed_experts_from_meta_info(choice).size == (3 + generated - 1) * 4 * 2


def test_the_log_tells_of_the_start_in_lines_of_json(app: httpx.Client) -> None:
    """The replica's lines stand in its own file of Serve's, those of its worker on its standard error."""
    body = {"prompt": [5], "max_tokens": 1, "nobody_knows_this": 1}
    assert app.post("/v1/completions", json=body, headers={"x-request-id": "seen-1"}).status_code == 200
    lines = {name: lines_of_json(pattern) for name, pattern in LOG_FILES.items()}
    (started,) = (line for line in lines["replica"] if line["message"].startswith("started: "))
    assert started["level"] == "INFO" and "KV pages" in started["message"]
    (ignored,) = (line for line in lines["replica"] if "nobody_knows_this" in line["message"])
    assert ignored["request_id"] == "seen-1" and ignored["level"] == "WARNING"
    assert any("host 0 of 1 loads" in line["message"] for line in lines["worker"])
    assert any("computes in float32 by the kernels" in line["message"] for line in lines["worker"])
    for line in (*lines["replica"], *lines["worker"]):
        assert datetime.fromisoformat(line["time"]).tzinfo is not None and line["level"] and line["logger"]


def test_stream_equals_the_whole(app: httpx.Client) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}}
    whole = app.post("/generate", json=body).json()
    with app.stream("POST", "/generate", json={**body, "stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    last = httpx.Response(200, text=events[-2]).json()
    assert last["output_ids"] == whole["output_ids"] and last["text"] == whole["text"]


def test_the_replica_does_not_collect_what_it_has_started_with(app: httpx.Client) -> None:
    """A full collection of a process that has loaded Ray holds its streams for 0.2 s, whatever brings it on."""
    assert complete(app).status_code == 200
    (name,) = (each for each in list_named_actors(all_namespaces=True) if "#moe-server#" in each["name"])
    replica = ray.get_actor(name["name"], namespace=name["namespace"])
    assert ray.get(replica.__ray_call__.remote(lambda _: gc.get_freeze_count())) > 100_000


def test_idle_costs_next_to_nothing(app: httpx.Client, foreign: set[int]) -> None:
    """After a graph-compiling load and a moment of rest, replica and workers use less than 0.05 core together."""
    assert complete(app, max_tokens=150).status_code == 200
    time.sleep(1.5)
    pids = [pid for pid in pids_of(*ACTORS) if pid not in foreign]
    assert len(pids) >= 2
    before = cpu_seconds(pids)
    time.sleep(IDLE_SECONDS)
    used = (cpu_seconds(pids) - before) / IDLE_SECONDS
    assert used < 0.05, f"{used:.3f} core while idle"
    assert complete(app).status_code == 200


def test_a_lost_worker_replaces_the_replica(app: httpx.Client, foreign: set[int]) -> None:
    """A killed host ends requests with 503 and when to try again, at once, until Serve has brought up a new replica."""
    wanted = complete(app).json()["choices"][0]["text"]
    (worker,) = [pid for pid in pids_of("ray::HostWorker") if pid not in foreign]
    os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        response = complete(app)
        if response.status_code == 200:
            break
        for refused in (response, app.get("/health", timeout=AT_ONCE_S)):
            assert refused.status_code in (200, 503), refused.text
            if refused.status_code == 503:
                assert refused.json()["error"]["type"] == "service_unavailable_error"
                assert int(refused.headers["retry-after"]) > 0
        time.sleep(0.5)
    assert response.json()["choices"][0]["text"] == wanted


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model_path": "x", "enable_return_routed_expert": True}, "did you mean 'enable_return_routed_experts'"),
        ({"model_path": "x", "num_hosts": "two"}, "num_hosts must be of type int"),
        ({}, "model_path is missing"),
    ],
)
def test_a_wrong_setting_is_a_deploy_error(args: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build(args)


def pids_of(*titles: str) -> list[int]:
    """Processes of Ray actors by the start of their titles."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            title = (entry / "cmdline").read_text()
            found += [int(entry.name)] if title.startswith(titles) else []
    return found


def lines_of_json(pattern: str) -> list[dict]:
    """Lines of this deployment's log files from the first in JSON on; what is before is Ray's or Serve's own."""
    session = Path(worker._global_node.get_session_dir_path())
    texts = [file.read_text() for file in session.glob(pattern)]
    return [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]


def cpu_seconds(pids: list[int]) -> float:
    ticks = os.sysconf("SC_CLK_TCK")
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / ticks
