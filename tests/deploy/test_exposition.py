"""`/metrics` keeps Prometheus' conventions, counts what was asked of the server, and is what the docs say."""

from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.fleet_metrics import metrics_of_a_fleet
from tests.deploy.manifests import ROOT

DOCS = (ROOT / "docs" / "metrics.md").read_text()
PREFIX = "rayserve_moe_"
BODY = {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
NOT_BASE_UNITS = re.compile(r"(_ms|_s|_millis|_milliseconds|_minutes|_mb|_kb|_percent|_perc)$")
RESERVED = ("_total", "_bucket", "_count", "_sum", "_created")
HISTOGRAMS = {
    "time_to_first_token_seconds": 2,
    "inter_token_latency_seconds": 8,
    "queue_time_seconds": 2,
    "request_duration_seconds": 2,
    "prompt_length_tokens": 2,
    "output_length_tokens": 2,
}
"""How many values each gets from two requests for five tokens."""


@pytest.fixture(scope="module")
def text(url):
    before = families_of(httpx.get(f"{url}/metrics").text)
    for _ in range(2):
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=60).status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={**BODY, "n": 0}).status_code == 400
    assert httpx.get(f"{url}/{'x' * 40}").status_code == 404
    after = httpx.get(f"{url}/metrics").text
    return before, after


@pytest.fixture(scope="module")
def families(text):
    return families_of(text[1])


def families_of(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def grown(text, name, **labels):
    def value(families):
        samples = [s for family in families.values() for s in family.samples if s.name == f"{PREFIX}{name}"]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    return value(families_of(text[1])) - value(text[0])


def test_names_and_units_are_those_of_prometheus(families):
    for name, family in families.items():
        assert re.fullmatch(r"rayserve_moe_[a-z0-9_]+", name) and "__" not in name
        assert not name.endswith(RESERVED) and not NOT_BASE_UNITS.search(name), name
        assert family.type in ("counter", "gauge", "histogram") and family.type not in name
        assert not name.endswith("_info") or [sample.value for sample in family.samples] == [1], name
        assert len(family.documentation) > 5 and family.documentation == family.documentation.strip()
        for sample in family.samples:
            assert sample.labels["model_name"], name
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name


def test_every_family_is_described_once(text):
    for word in ("HELP", "TYPE"):
        names = re.findall(rf"^# {word} (\S+)", text[1], re.MULTILINE)
        assert len(names) == len(set(names)) == len(families_of(text[1]))
    samples = [line.rpartition(" ")[0] for line in text[1].splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))


def test_buckets_of_histograms_add_up(families):
    found = {name.removeprefix(PREFIX) for name, family in families.items() if family.type == "histogram"}
    assert found == set(HISTOGRAMS)
    for name in found:
        samples = families[PREFIX + name].samples
        buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
        (count,) = (s.value for s in samples if s.name.endswith("_count"))
        assert buckets == sorted(buckets) and len({bound for bound, _ in buckets}) == len(buckets)
        assert [value for _, value in buckets] == sorted(value for _, value in buckets)
        assert buckets[-1] == (float("inf"), count)


def test_requests_are_measured(text):
    for name, count in HISTOGRAMS.items():
        assert grown(text, f"{name}_count") == count, name
        assert grown(text, f"{name}_sum") > 0
    assert grown(text, "output_length_tokens_sum") == 10
    assert grown(text, "prompt_length_tokens_bucket", le="4.0") == 2
    assert grown(text, "prompt_tokens_total") == 6
    assert grown(text, "choices_finished_total", reason="length") == 2


def test_the_build_and_the_weights_are_labels_of_a_one(families):
    (build,) = families[f"{PREFIX}build_info"].samples
    assert {build.labels[name] for name in ("version", "jax", "ray")}.isdisjoint({"", "unknown"})
    (weights,) = families[f"{PREFIX}weight_version_info"].samples
    assert weights.labels["weight_version"] == "0"


def test_answers_are_counted_by_route_and_status(text):
    assert grown(text, "http_requests_total", route="/v1/completions", status="200") == 2
    assert grown(text, "http_requests_total", route="/v1/completions", status="400") == 1
    assert grown(text, "http_requests_total", route="none", status="404") == 1
    assert "xxxx" not in text[1], "clients choose paths"


def test_the_docs_list_every_metric_and_those_of_vllm(families):
    listed = re.findall(rf"^\| `({PREFIX}\w+)` \| (\w+) \|", DOCS, re.MULTILINE)
    told = {name + "_total" * (family.type == "counter"): family.type for name, family in families.items()}
    only_with_limits = {f"{PREFIX}picks_{n}" for n in ("kept_ratio", "rerouted_total", "unfilled_total")}
    only_with_limits |= {f"{PREFIX}rank_imbalance_ratio"}
    only_with_workers = {f"{PREFIX}{n}_total" for n in ("rebuilds", "rebuild_seconds", "rebuild_phase_seconds")}
    only_with_workers |= {f"{PREFIX}{n}" for n in ("requests_carried_over_total", "hosts_missing")}
    only_with_adapters = {f"{PREFIX}adapters_{n}" for n in ("loaded", "resident", "dropped_total")}
    only_with_adapters |= {f"{PREFIX}adapter_loads_total"}
    counted = ("offloaded", "restored", "computed", "without_rows")
    only_with_host_memory = {f"{PREFIX}host_pages{n}" for n in ("", "_used", *(f"_{each}_total" for each in counted))}
    only_with_host_memory |= {
        f"{PREFIX}{n}_total" for n in ("pushed_pages_sent", "pushed_pages_received", "pushes_refused")
    }
    only_in_fleets = {f.name + "_total" * (f.type == "counter"): f.type for f in metrics_of_a_fleet()}
    only_sometimes = only_with_limits | only_with_workers | only_with_adapters | only_with_host_memory
    only_sometimes |= only_in_fleets.keys()
    assert {name: kind for name, kind in listed if name not in only_sometimes} == told
    assert only_sometimes <= dict(listed).keys() and only_in_fleets.items() <= dict(listed).items()
    mapped = re.findall(rf"^\| `vllm:\w+` \| .*?`({PREFIX}\w+)`", DOCS, re.MULTILINE)
    assert len(mapped) > 10 and set(mapped) <= dict(listed).keys()
