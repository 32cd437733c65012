"""Results have the same bits on any host and replica with `invariant_products`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayserve_moe import Engine
from rayserve_moe.text.tokenizer import Tokenizer
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_families import over
from tests.cluster.test_fleet import WITHIN_S, is_whole
from tests.cluster.test_hosts import assert_same, complete, running, starting_hosts, transport_to
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.serving.http_client import GENERATE, wait_until

pytestmark = pytest.mark.slow

ON = {**SETTINGS, "invariant_products": "on"}
RANKS = {**ON, "data_parallel_size": 2, "expert_backend": "all_to_all"}
"""Two data ranks of one device each."""
NUM_TOKENS, NUM_OTHERS = 40, 24


def test_two_hosts_answer_with_the_bits_of_one_process(raylets: int, checkpoint: Path) -> None:
    with Engine(str(checkpoint), **RANKS, devices_per_host=2) as engine:
        card, expected = engine.card, complete(engine.loop, engine.tokenizer)
    with starting_hosts(checkpoint, **{**RANKS, "devices_per_host": 1}) as executor:
        started = executor.start()
        with running(over(transport_to(executor, "sockets"), started), card, num_data_ranks=2) as loop:
            found = complete(loop, Tokenizer(checkpoint))
    assert_same(found, expected)
    assert [result.logprobs for result in found] == [result.logprobs for result in expected]


def body_of(prompt: list[int], *, num_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def steps_of(fleet: httpx.Client) -> dict[str, int]:
    """Return the number of steps of each replica."""
    replicas = fleet.get("/server_info").json()["replicas"]
    return {name: each["steps"] for name, each in replicas.items()}


def test_two_replicas_answer_with_the_same_bits_beside_other_requests(raylets: int, checkpoint: Path) -> None:
    settings = {**ON, "num_replicas": 2, "cpus_per_host": 0.25}
    with deployed(checkpoint, settings, port=free_port()) as fleet, ThreadPoolExecutor(8) as beside:
        wait_until(lambda: is_whole(fleet), within_s=WITHIN_S)
        before = steps_of(fleet)
        same = body_of([5, 6, 7], num_tokens=NUM_TOKENS)
        others = [body_of([8, *range(9, 9 + number)], num_tokens=1 + number) for number in range(NUM_OTHERS)]
        bodies = [body for other in others for body in (same, other)]
        answers = [answer.json() for answer in beside.map(lambda body: fleet.post(GENERATE, json=body), bodies)]
        after = steps_of(fleet)
    assert len(before) == 2 and all(after[name] >= before[name] + NUM_TOKENS for name in before)
    logprobs = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers[::2]]
    assert len(logprobs[0]) == NUM_TOKENS and all(each == logprobs[0] for each in logprobs)
