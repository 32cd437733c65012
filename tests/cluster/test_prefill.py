"""A replica computes long prompts for another, over real Serve: the same answers, also after either is killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import ray

from benchmarks.prefill_served import HOST, LIMIT_S, kill_each, roles, transfers, wait_until_whole
from benchmarks.serve_process import ServeProcess
from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.cluster.replica_engine import start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.inprocess.running import run_to_end
from rayserve_moe.requests.records import GenerationRequest
from tests.cluster.conftest import SETTINGS
from tests.support.engine.neighbour import Neighbour
from tests.support.engine.workload import request_for

LONG = list(range(3, 203))
BODY = {
    "input_ids": LONG,
    "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
    "return_routed_experts": True,
}


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServeProcess]:
    settings = {**SETTINGS, "model_path": str(checkpoint), "num_replicas": 2, "num_prefill_replicas": 1}
    settings |= {"host_cache_mib": 64, "max_model_len": 2048, "num_pages": 600}
    with ServeProcess(settings) as server:
        wait_until_whole(server)
        yield server


@pytest.mark.slow
def test_pages_of_a_long_prompt_come_from_the_other_replica(server: ServeProcess):
    before = transfers(server)
    with httpx.Client(base_url=f"http://{HOST}:{server.port}", timeout=LIMIT_S) as client:
        first = client.post("/generate", json=BODY).json()
        again = client.post("/generate", json=BODY).json()
        client.post("/flush_cache").raise_for_status()
        computed = client.post("/generate", json={**BODY, "return_logprob": True, "logprob_start_len": 0}).json()
    whole = (len(LONG) - 1) // 16 * 16
    info = first["meta_info"]["routed_experts_info"]
    assert info["source"][0] == [0, whole, "transferred"] and first["meta_info"]["cached_tokens"] == whole
    for answer in (again, computed):
        assert answer["output_ids"] == first["output_ids"]
        assert answer["meta_info"]["routed_experts"] == first["meta_info"]["routed_experts"]
    moved = {name: count - before[name] for name, count in transfers(server).items()}
    assert moved["rayserve_moe_pushed_pages_received_total"] == whole // 16
    assert moved["rayserve_moe_pushed_pages_sent_total"] == whole // 16
    assert moved["rayserve_moe_pushes_refused_total"] == 0


@pytest.mark.slow
def test_a_killed_replica_of_either_role_costs_no_request(server: ServeProcess):
    before = roles(server)
    counts = kill_each(server, kills=1, vocab_size=PRESETS["tiny"].vocab_size)
    for seen in counts.values():
        assert seen["kills"] == 1 and not (seen["lost"] or seen["ids"] or seen["rows"]), counts
    wait_until_whole(server)
    assert roles(server) != before


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_pages_pass_from_the_hosts_of_a_group_to_those_of_another(raylets: int, checkpoint: Path, num_hosts: int):
    """A killed prefill host is replaced, or the prompt is computed where it is answered."""
    values = {**SETTINGS, "model_path": str(checkpoint), "host_cache_mib": 32, "num_hosts": num_hosts}
    settings = settings_from({**values, "cpus_per_host": 0.25})
    requests = [request_for(LONG, f"{number}", max_new_tokens=8, temperature=0.0) for number in range(3)]
    with ExitStack() as closing:
        decodes, prefills = start_replica_engine(settings), start_replica_engine(settings)
        closing.callback(decodes.shutdown)
        closing.callback(prefills.shutdown)
        pushes, neighbour = decodes.loop.control.pushes, Neighbour(prefills.loop)
        assert pushes is not None

        def answer(request: GenerationRequest) -> tuple[list[int], list[tuple[int, int, str]]]:
            (done,) = run_to_end(decodes.loop, decodes.tokenizer, requests=[request], shows_progress=False)
            result = done.results[0]
            assert result.routing is not None and decodes.loop.control.flush().result()
            return list(result.token_ids), list(result.routing.source)

        expected, _ = answer(requests[0])
        pushes.receive_from(neighbour, min_tokens=32)
        found, source = answer(requests[1])
        assert found == expected and not pushes.refused
        assert source[0] == (0, (len(LONG) - 1) // 16 * 16, "transferred")
        assert prefills.loop.control.flush().result()
        killing = threading.Timer(0.05, lambda: [ray.kill(worker) for worker in prefills.executor.workers])
        killing.start()
        assert answer(requests[2])[0] == expected
        killing.join()
