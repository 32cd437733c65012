"""Spans go where the usual variables say, under the caller's trace, and never hold up or break a server."""

from __future__ import annotations

import logging

import pytest

from rayserve_moe.observability import spans
from rayserve_moe.observability.spans import Parent, Span, SpanExporter, exporter_from_environment, pairs, parent_of
from tests.support.serving.otlp_collector import running_collector

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "HEADERS", "TRACES_HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("SERVICE_NAME", "RESOURCE_ATTRIBUTES", "TRACES_SAMPLER", "TRACES_SAMPLER_ARG", "SDK_DISABLED"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


def test_nothing_runs_without_an_endpoint():
    assert exporter_from_environment() is None


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, ""),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTLP receiver for HTTP"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "collector:4317"}, "OTLP receiver for HTTP"),
    ],
)
def test_what_switches_spans_off(monkeypatch, caplog, variables, reason):
    for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", **variables}.items():
        monkeypatch.setenv(name, value)
    assert exporter_from_environment() is None
    assert bool(caplog.records) == bool(reason) and reason in caplog.text


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "{}"}, "/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "{}/otlp/"}, "/otlp/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "{}/here", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://no"}, "/here"),
    ],
)
def test_spans_arrive_where_the_variables_say(monkeypatch, variables, path):
    with running_collector() as collector:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(collector.url))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-team=moe")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "policy")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        exporter = exporter_from_environment()
        about = {"tokens": 3, "seconds": 0.5, "is_kept": True, "reasons": ["stop"]}
        exporter.add([Span("whole", 1.5, 2.0, TRACE, attributes=about, is_error=True)])
        exporter.flush()
        ((asked, headers, body),) = collector.received
        (span,) = collector.spans
    assert asked == path
    sent = {name.lower(): value for name, value in headers.items()}
    assert (sent["authorization"], sent["x-team"]) == ("Bearer abc", "moe")
    resource = {
        each["key"]: each["value"]["stringValue"] for each in body["resourceSpans"][0]["resource"]["attributes"]
    }
    assert resource == {"service.name": "policy", "deployment.environment": "test"}
    assert span["attributes"] == about and span["status"] == {"code": 2} and span["traceId"] == TRACE
    assert (span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("1500000000", "2000000000")
    assert "parentSpanId" not in span


@pytest.mark.parametrize("status", [500, 0])
def test_an_endpoint_that_does_not_take_spans_is_named_once(caplog, status):
    with running_collector() as collector:
        collector.status = status
        exporter = SpanExporter(collector.url if status else "http://127.0.0.1:9")
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                exporter.add([Span("a", 1, 2, TRACE)])
                exporter.flush()
    assert len(caplog.records) == 1 and "spans are dropped" in caplog.text


def test_an_endpoint_that_hangs_holds_nothing_up(monkeypatch, caplog):
    monkeypatch.setattr(spans, "MAX_WAITING", 1)
    monkeypatch.setattr(SpanExporter, "_send_all", lambda self: None)
    exporter = SpanExporter("http://127.0.0.1:9")
    for _ in range(3):
        exporter.add([Span("a", 1, 2, TRACE)])
    assert "too many spans wait" in caplog.text


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (f"00-{TRACE}-{CALLER}-01", Parent(TRACE, CALLER, is_sampled=True)),
        (f" 00-{TRACE}-{CALLER}-00 ", Parent(TRACE, CALLER, is_sampled=False)),
        (f"01-{TRACE}-{CALLER}-03-later", Parent(TRACE, CALLER, is_sampled=True)),
        (f"00-{TRACE}-{CALLER}-01-more", None),
        (f"ff-{TRACE}-{CALLER}-01", None),
        (f"00-{'0' * 32}-{CALLER}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{CALLER}-01", None),
        ("", None),
    ],
)
def test_a_caller_is_known_by_a_header_of_the_standard(header, parent):
    assert parent_of(header) == parent


@pytest.mark.parametrize(
    ("sampler", "argument", "ratio"), [("traceidratio", "0", 0), ("parentbased_traceidratio", "x", 1)]
)
def test_the_callers_decision_comes_before_the_ratio(monkeypatch, sampler, argument, ratio):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    exporter = exporter_from_environment()
    assert exporter.takes(None) == bool(ratio)
    assert exporter.takes(Parent(TRACE, CALLER, is_sampled=True))
    assert not exporter.takes(Parent(TRACE, CALLER, is_sampled=False))


def test_pairs_of_a_variable():
    assert pairs("a=1, b = x%3Dy ,=2,c,") == {"a": "1", "b": "x=y"}
