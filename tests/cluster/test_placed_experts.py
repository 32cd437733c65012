"""A rollout job moves the experts of its server, and a worker is killed while they move."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rayserve_moe.balancing.coactivation import ServedGroup, plan_from_rows
from rayserve_moe.balancing.placement_file import placement_in
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.rollouts.plan_experts import trace_of
from rayserve_moe.rollouts.records import load
from tests.cluster.conftest import SETTINGS, until
from tests.cluster.test_rollout_faults import kill
from tests.rollouts.support import job, summary_in
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.experts.eplb_proposals import SUMMED_CONFIG

MOVED = {
    "enable_eplb": True,
    "eplb_interval": 1_000_000,
    "eplb_slots_per_step": 1,
    "num_redundant_experts": 4,
    "devices_per_host": 4,
}
BATCH = 8


def answer(client: httpx.Client, *, num_tokens: int = 24) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_logprob": True}
    return client.post("/generate", json=body).raise_for_status().json()


def logprobs_of(told: dict[str, Any]) -> list[list[Any]]:
    return told["meta_info"]["output_token_logprobs"]


def progress(client: httpx.Client) -> dict[str, Any]:
    return client.get("/experts/state").raise_for_status().json()["progress"]


@pytest.mark.slow
def test_experts_arrive_where_a_job_planned_them_though_a_worker_is_killed_on_the_way(
    raylets: int, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", SUMMED_CONFIG, seed=3, dtype="float32")
    rows = [{"id": i, "input_ids": [5 + i, 6, 7]} for i in range(8)]
    prompts, out, port = tmp_path / "prompts.jsonl", tmp_path / "out", free_port()
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with deployed(checkpoint, {**SETTINGS, **MOVED}, port=port, name="placed") as client:
        expected = logprobs_of(answer(client))
        start = placement_in(client.get("/experts/placement").json())
        url = f"http://127.0.0.1:{port}"
        assert job(prompts, out, "--url", url, "--place-experts", str(BATCH)) == 0
        assert summary_in(out)["experts"] == "experts move to placement 1"
        trace = trace_of(load(out))
        group = ServedGroup(start.ep_size, start.num_redundant, BATCH)
        planned = plan_from_rows(trace.rows, group, num_experts=trace.num_experts, today=start)
        assert (planned.expert_of_slot != start.expert_of_slot).any()
        while not progress(client)["slots_done"]:
            answer(client, num_tokens=1)
        assert not progress(client)["is_done"], "a worker is lost while experts move"
        with ThreadPoolExecutor(1) as background:
            under_way = background.submit(answer, client)
            kill("ray::HostWorker")
            found = logprobs_of(under_way.result(600))
        assert [entry[1] for entry in found] == [entry[1] for entry in expected]
        np.testing.assert_allclose([entry[0] for entry in found], [entry[0] for entry in expected], atol=1e-5)

        def has_arrived() -> bool:
            assert logprobs_of(answer(client)) == expected
            return progress(client)["is_done"]

        until(has_arrived, "experts do not arrive")
        now = placement_in(client.get("/experts/placement").json())
        np.testing.assert_array_equal(now.expert_of_slot, planned.expert_of_slot)
        assert logprobs_of(answer(client)) == expected, "after the move"
