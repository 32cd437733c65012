"""The number of replicas follows their demand over real Serve, up and down again, and no request is lost by it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import SETTINGS
from tests.cluster.test_fleet import running
from tests.support.cluster.deployed_server import deployed
from tests.support.cluster.ports import free_port
from tests.support.serving.http_client import wait_until

PORT = free_port()
WITHIN_S = 300.0
MOST = 3
BOUNDS = {"min_replicas": 1, "max_replicas": MOST, "upscale_delay_s": 1, "downscale_delay_s": 2}
NUM_CLIENTS = 12
"""Three times the rows of a replica: its demand is 3, and at 0.7 a replica five are wanted."""


@pytest.fixture(scope="module")
def fleet(raylets: int, checkpoint: Path) -> Iterator[httpx.Client]:
    settings = {**SETTINGS, **BOUNDS, "cpus_per_host": 0.25, "journal": "off"}
    with deployed(checkpoint, settings, port=PORT) as client:
        yield client


@pytest.mark.slow
def test_replicas_come_with_demand_and_drain_without_it(fleet: httpx.Client):
    stop = threading.Event()

    def ask(number: int) -> list[tuple[int, ...]]:
        """Answers of one client, one after the other, as long as there is to be load; one more afterwards."""
        sampling = {"max_new_tokens": 120 + number, "temperature": 0, "ignore_eos": True}
        answers = []
        while True:
            is_last = stop.is_set()
            answer = fleet.post("/generate", json={"input_ids": [5, 6, 7 + number], "sampling_params": sampling})
            assert answer.status_code == 200, answer.text
            answers.append(tuple(answer.json()["output_ids"]))
            if is_last:
                return answers

    assert len(running()) == 1
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(ask, number) for number in range(NUM_CLIENTS)]
        wait_until(lambda: len(running()) == MOST or any(client.done() for client in clients), within_s=WITHIN_S)
        stop.set()
        found = [client.result() for client in clients]
    wait_until(lambda: len(running()) == 1, within_s=WITHIN_S)
    for number, answers in enumerate(found):
        assert len(set(answers)) == 1 and len(answers[0]) == 120 + number
    assert fleet.get("/health").status_code == 200
