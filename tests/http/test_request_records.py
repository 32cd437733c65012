"""What a request cost, as a line of the log and as spans: the same numbers that its answer has."""

from __future__ import annotations

import io
import json
import logging
import math

import httpx
import pytest

from rayserve_moe.config.settings import LoggingSettings
from rayserve_moe.observability.logs import use_logging
from tests.http.conftest import served
from tests.support.serving.http_client import wait_until
from tests.support.serving.otlp_collector import running_collector

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def written(monkeypatch):
    """Lines of the package in JSON."""
    root, text = logging.getLogger("rayserve_moe"), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    use_logging(LoggingSettings(format="json"), handlers=[logging.StreamHandler(text)])
    return text


def lines_of(written):
    lines = map(json.loads, written.getvalue().splitlines())
    return [line for line in lines if line["logger"].endswith("middleware.traffic")]


def test_a_line_per_request_has_its_tokens_times_and_ends(engine, written):
    with served(engine, log_requests=True) as url, httpx.Client(base_url=url, timeout=60) as http:
        http.post("/v1/completions", json={**BODY, "n": 2}, headers={"x-request-id": "mine"}).raise_for_status()
        assert http.post("/v1/completions", json={**BODY, "n": 0}).status_code == 400
        assert http.get("/zq7-marker").status_code == 404
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            answer.read()
    whole, refused, unknown, streamed = lines_of(written)
    counts = {"prompt_tokens": 3, "output_tokens": 10, "finish_reasons": ["length"], "status": 200}
    assert counts.items() <= whole.items() and whole["request_id"] == "mine"
    assert (whole["route"], whole["method"]) == ("/v1/completions", "POST")
    assert 0 <= whole["queue_s"] <= whole["ttft_s"] <= whole["duration_s"]
    assert refused["status"] == 400 and "output_tokens" not in refused
    assert unknown["route"] == "none" and "zq7" not in json.dumps(unknown)
    assert streamed["output_tokens"] == 5 and streamed["cached_tokens"] <= 3


def test_no_line_is_written_unless_it_is_asked_for(engine, written):
    with served(engine) as url:
        httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).raise_for_status()
    assert lines_of(written) == []


def test_spans_of_a_request_lie_in_the_callers_trace(engine, monkeypatch):
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with served(engine) as url:
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "team=7", "x-request-id": "mine"}
            httpx.post(f"{url}/v1/completions", json=BODY, headers=headers, timeout=60).raise_for_status()
            not_sampled = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
            httpx.post(f"{url}/v1/completions", json=BODY, headers=not_sampled, timeout=60).raise_for_status()
            httpx.post(f"{url}/v1/completions", json={**BODY, "n": 2}, timeout=60).raise_for_status()
            wait_until(lambda: len(collector.spans) == 4 + 7, within_s=60)
        spans = collector.spans
    ours = [span for span in spans if span["traceId"] == TRACE]
    (root,) = (span for span in ours if span["kind"] == 2)
    assert (root["parentSpanId"], root["traceState"], root["name"]) == (CALLER, "team=7", "POST /v1/completions")
    wanted = {
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.id": "mine",
    }
    assert wanted.items() <= root["attributes"].items()
    phases = {span["name"]: span for span in ours if span is not root}
    assert list(phases) == ["queue", "prefill", "decode"]
    times = [(int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])) for span in phases.values()]
    assert all(span["parentSpanId"] == root["spanId"] for span in phases.values())
    assert times[0][1] == times[1][0] and times[1][1] == times[2][0] and times == sorted(times)
    start, end = int(root["startTimeUnixNano"]), int(root["endTimeUnixNano"])
    assert start <= times[0][0] and times[-1][1] <= end
    to_first = root["attributes"]["gen_ai.latency.time_to_first_token"]
    assert math.isclose(start + to_first * 1e9, times[1][1], abs_tol=5e6)
    others = [span for span in spans if span["traceId"] != TRACE]
    choices = sorted(span["attributes"].get("choice", -1) for span in others)
    assert choices == [-1, 0, 0, 0, 1, 1, 1]  # fmt: skip
