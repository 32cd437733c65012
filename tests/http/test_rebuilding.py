"""What clients see while lost hosts are replaced: streams stay open, probes say so, and late requests are put off."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from rayserve_moe.config.settings import ClusterSettings, Settings
from rayserve_moe.engine import admission
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.serving.api.answers import streaming
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.devices.counting_executor import CARD
from tests.support.devices.lost_hosts import LosingExecutor
from tests.support.serving.http_server import running

DEADLINE_S = 60.0
BODY = {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True}


def probes(url: str) -> tuple[int, int]:
    """The statuses of `/health` and `/ready`."""
    return httpx.get(f"{url}/health").status_code, httpx.get(f"{url}/ready").status_code


def test_clients_are_kept_while_hosts_are_replaced(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streaming, "COMMENT_EVERY_S", 0.05)
    executor = LosingExecutor(frozenset([9]))
    executor.may_rebuild.clear()
    loop = EngineLoop(executor, CARD, settings=Settings(cluster=ClusterSettings(idle_release_s=60)), rebuilder=executor)
    api = create_api(ApiState(loop, Tokenizer(checkpoint)))
    commented = threading.Event()

    def stream(url: str) -> str:
        with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=DEADLINE_S) as answer:
            text = ""
            for part in answer.iter_text():
                text += part
                if ": hosts are being replaced" in text:
                    commented.set()
        return text

    with (
        running(api) as url,
        ThreadPoolExecutor(2) as pool,
        ExitStack() as closing,
        caplog.at_level(logging.CRITICAL + 1),
    ):
        closing.callback(executor.may_rebuild.set)  # before the pool waits for its threads, even if this test fails
        assert probes(url) == (200, 200)
        streamed = pool.submit(stream, url)
        assert commented.wait(DEADLINE_S)
        plain = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY, timeout=DEADLINE_S)
        health = httpx.get(f"{url}/health").json()
        assert (health["status"], health["phase"]) == ("rebuilding", "starting") and health["seconds"] > 0
        ready = httpx.get(f"{url}/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "rebuilding")
        assert probes(url) == (200, 503)
        while loop.statistics()["requests_live"] < 2:
            pass
        monkeypatch.setattr(admission, "MAX_QUEUE_S", 0.0)
        late = httpx.post(f"{url}/v1/completions", json=BODY)
        assert (late.status_code, late.json()["error"]["code"], late.headers["retry-after"]) == (503, "rebuilding", "5")
        executor.may_rebuild.set()
        text = streamed.result(DEADLINE_S)
        assert plain.result(DEADLINE_S).status_code == 200
        assert text.endswith("data: [DONE]\n\n") and '"error"' not in text
        assert httpx.get(f"{url}/health").json() == {"status": "ok"} and probes(url) == (200, 200)
        metrics = httpx.get(f"{url}/metrics").text
    assert 'rayserve_moe_rebuilds_total{model_name="counting"} 1.0' in metrics
    assert 'rayserve_moe_requests_carried_over_total{model_name="counting"} 1.0' in metrics
    loop.shutdown()
