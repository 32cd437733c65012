"""Two replicas behind HAProxy and its routers: conversations find their cache, and odd bodies a replica."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.serve_process import HOST
from rayserve_moe.fleet.load_average import AVERAGED_S
from rayserve_moe.fleet.page_feed import REPORT_S
from tests.cluster.conftest import SETTINGS
from tests.support.cluster.separate_server import own_server
from tests.support.serving.http_client import wait_until

NUM_CONVERSATIONS, NUM_TURNS = 6, 4
MOST = 5
"""Requests that a replica takes."""


def post(port: int, path: str, body: bytes) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content)


def generate(port: int, ids: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer = post(port, "/generate", json.dumps({"input_ids": ids, "sampling_params": sampling}).encode())
    assert status == 200, answer
    return answer


def num_live(port: int) -> int:
    """Requests of the fleet, running or waiting."""
    loads = httpx.get(f"http://{HOST}:{port}/v1/loads", timeout=120).json()
    return loads["num_running_reqs"] + loads["num_waiting_reqs"]


@pytest.fixture(scope="module")
def port(checkpoint: Path):
    own = {"model_path": str(checkpoint), "num_replicas": 2, "max_waiting_requests": MOST - 4}
    with own_server({**SETTINGS, **own}) as server:
        wait_until_routed(server.port)
        yield server.port


def wait_until_routed(port: int) -> None:
    """Until routers know all replicas: eight times in a row a prompt is found where it was sent before."""
    deadline, in_a_row, ids = time.monotonic() + 120, 0, list(range(3, 83))
    while in_a_row < 8:
        assert time.monotonic() < deadline
        in_a_row = in_a_row + 1 if generate(port, ids)["meta_info"]["cached_tokens"] == 64 else 0
        time.sleep(0.2)


@pytest.mark.slow
def test_every_turn_finds_what_the_turns_before_have_left(port):
    draw = np.random.default_rng(0)
    histories: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    recomputed = 0
    for turn in range(NUM_TURNS):
        for history in histories:
            known = max(len(history) - 1, 0) // 16 * 16
            history += draw.integers(3, 400, 20).tolist()
            answer = generate(port, history)
            time.sleep(4 * AVERAGED_S)  # one at a time: load decides nothing
            recomputed += known - answer["meta_info"]["cached_tokens"] if turn else 0
            history += answer["output_ids"]
    assert recomputed == 0


@pytest.mark.slow
def test_a_long_prefix_does_not_send_a_request_to_a_replica_that_is_full(port):
    """Its cache alone would draw all ten, where each takes five."""
    ids = list(range(3, 243))
    generate(port, ids)
    assert post(port, "/pause_generation", b'{"mode": "in_place"}')[0] == 200
    with ThreadPoolExecutor(2 * MOST) as threads:
        try:
            answers = []
            for count in range(2 * MOST):
                answers.append(threads.submit(generate, port, ids))
                wait_until(lambda count=count: num_live(port) == count + 1 or answers[-1].done(), within_s=120)
                time.sleep(10 * REPORT_S)  # routers know of it
        finally:
            assert post(port, "/continue_generation", b"{}")[0] == 200
        outputs = [answer.result()["output_ids"] for answer in answers]
    assert outputs == outputs[:1] * 2 * MOST


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{", b'{"input_ids": "x"}', b'{"prompt": [[]]}', b'{"text": {}}']
)
def test_a_body_that_no_router_understands_is_answered_by_a_replica(port, body):
    status, answer = post(port, "/generate", body)
    assert status == 400 and answer["error"]["message"]
