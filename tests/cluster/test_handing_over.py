"""A replica that `rayserve-moe scale` takes away hands named requests over, completes the others, and loses none."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.kill_fleet import wait_until_whole
from benchmarks.resuming_client import ResumingClient
from benchmarks.serve_process import HOST
from tests.cluster.conftest import SETTINGS
from tests.cluster.test_fleet import seen
from tests.support.cluster.separate_server import own_server

WITHIN_S = 300.0
NUM_CLIENTS = 12
"""Of three kinds: named streams, named plain requests, plain ones without a name."""
LIMITS = {"max_model_len": 1024, "num_pages": 1024, "max_running_requests": 12, "precompile_bs_paddings": [12]}
Ask = Callable[[int, int], dict[str, Any]]


def body_of(number: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": 700 + number, "temperature": 0, "ignore_eos": True, "frequency_penalty": 0.5}
    parts = {"return_logprob": True, "return_routed_experts": True}
    return {"input_ids": [5, 6, 7 + number], "sampling_params": sampling, **parts}


def ask_again(ask: Ask, number: int, stop: threading.Event) -> list[dict[str, Any]]:
    """Answers of one client, one after the other, until there are to be no more; one begins after that."""
    answers = []
    for count in itertools.count():
        is_last = stop.is_set()
        answers.append(ask(number, count))
        if is_last:
            return answers
    raise AssertionError("there is no last number")


@pytest.mark.slow
def test_scaling_down_under_load_loses_no_request(checkpoint: Path):
    settings = {**SETTINGS, **LIMITS, "model_path": str(checkpoint), "num_replicas": 2, "hand_over_after_s": 0}
    with own_server(settings) as server, httpx.Client(base_url=f"http://{HOST}:{server.port}", timeout=600) as plain:
        wait_until_whole(server)
        resuming, stop = ResumingClient(f"http://{HOST}:{server.port}", within_s=WITHIN_S), threading.Event()

        def ask_named(number: int, count: int, *, streams: bool) -> dict[str, Any]:
            return resuming.ask({**body_of(number), "rid": f"{number} {count}", "stream": streams})

        def ask_unnamed(number: int, _: int) -> dict[str, Any]:
            answer = plain.post("/generate", json=body_of(number))
            assert answer.status_code == 200, answer.text
            return answer.json()

        asks = (partial(ask_named, streams=True), partial(ask_named, streams=False), ask_unnamed)
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            clients = [threads.submit(ask_again, asks[number % 3], number, stop) for number in range(NUM_CLIENTS)]
            try:
                time.sleep(1)
                command = [Path(sys.executable).parent / "rayserve-moe", "scale", "bench", "1"]
                scaled = subprocess.run(command, capture_output=True, text=True, check=False)
            finally:
                stop.set()
            found = [client.result() for client in clients]
        assert scaled.returncode == 0, scaled.stderr
        assert resuming.num_cut >= resuming.num_resumed >= 1
        for answers in found:
            for answer in answers:
                assert seen(answer) == seen(answers[0])
