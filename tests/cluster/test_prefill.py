"""A replica computes long prompts for another, over real Serve: the same answers, also after either is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.prefill_served import HOST, LIMIT_S, kill_each, roles, transfers, wait_until_whole
from benchmarks.serve_process import ServeProcess
from rayserve_moe.checkpoints.synthetic import PRESETS
from tests.cluster.conftest import SETTINGS

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
    found = transfers(server)
    assert found["rayserve_moe_pushed_pages_received_total"] == whole // 16
    assert found["rayserve_moe_pushed_pages_sent_total"] == whole // 16
    assert found["rayserve_moe_pushes_refused_total"] == 0


@pytest.mark.slow
def test_a_killed_replica_of_either_role_costs_no_request(server: ServeProcess):
    before = roles(server)
    counts = kill_each(server, kills=1, vocab_size=PRESETS["tiny"].vocab_size)
    for seen in counts.values():
        assert seen["kills"] == 1 and not (seen["lost"] or seen["ids"] or seen["rows"]), counts
    wait_until_whole(server)
    assert roles(server) != before
