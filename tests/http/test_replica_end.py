"""A replica whose engine fails: every client hears of it, then the process ends."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rayserve_moe.cluster.replica_engine import ReplicaEngine
from rayserve_moe.config.settings import ClusterSettings, Settings
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.app import end_after_failure
from rayserve_moe.serving.http import create_api
from rayserve_moe.serving.middleware.traffic import Traffic
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.devices.counting_executor import CARD, CountingExecutor
from tests.support.serving.http_server import running

NUM_STREAMS = NUM_PLAIN = 4
DEADLINE_S = 60.0


def ask(url: str, *, streams: bool) -> str:
    body = {"prompt": [5, 6], "max_tokens": 50, "stream": streams, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S)
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.json()['error']['type']} {answer.headers.get('retry-after')}"
    ends_well = answer.text.endswith("data: [DONE]\n\n")
    return "error event" if 'data: {"error"' in answer.text and ends_well else "no error"


@pytest.mark.parametrize("fails", [True, False])
def test_a_replica_ends_when_its_engine_has_failed_and_everybody_was_told(
    fails: bool, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor, traffic, process_ended = CountingExecutor(), Traffic(), threading.Event()
    executor.may_step.clear()
    loop = EngineLoop(executor, CARD, settings=Settings(cluster=ClusterSettings(idle_release_s=60)))
    tokenizer = Tokenizer(checkpoint)
    replica = ReplicaEngine(loop, tokenizer, executor)
    num_unanswered: list[int] = []

    def end_process() -> None:
        num_unanswered.append(traffic.num_open)
        process_ended.set()

    ending = threading.Thread(target=end_after_failure, args=(replica, traffic), kwargs={"end_process": end_process})
    ending.start()
    api = create_api(ApiState(loop, tokenizer, traffic=traffic))
    with (
        running(api) as url,
        ThreadPoolExecutor(NUM_STREAMS + NUM_PLAIN) as pool,
        caplog.at_level(logging.CRITICAL + 1),
    ):
        asking = [pool.submit(ask, url, streams=i < NUM_STREAMS) for i in range(NUM_STREAMS + NUM_PLAIN)]
        deadline = time.monotonic() + DEADLINE_S
        while loop.statistics()["requests_live"] < len(asking):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        executor.fails_from = 0 if fails else float("inf")
        executor.may_step.set()
        if fails:
            assert process_ended.wait(DEADLINE_S)
        else:
            loop.shutdown()
        ending.join(DEADLINE_S)
        told = [asked.result(DEADLINE_S) for asked in asking]
    assert num_unanswered == ([0] if fails else [])
    if fails:
        assert told == ["error event"] * NUM_STREAMS + ["503 service_unavailable_error 5"] * NUM_PLAIN
    assert executor.num_shutdowns == 1
