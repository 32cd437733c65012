"""The page of metrics, written from `observability/metric_texts.py` by `python -m tests.architecture.metrics_page`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rayserve_moe.observability.metric_texts import METRICS, MetricText

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
PREFIX = "rayserve_moe_"
MAX_COLUMNS = 120


class Group(NamedTuple):
    """A heading of the page."""

    title: str
    starts: tuple[str, ...]
    """Names of its metrics: exact, or prefixes that end with `_`."""
    note: str = ""


GROUPS = (
    Group("Server", ("build_info", "weight_version_info", "paused", "http_")),
    Group(
        "Requests and choices",
        (
            "requests_live",
            "requests_running",
            "requests_waiting",
            "preemptions",
            "choices_finished",
            "prompt_",
            "time_to_",
            "inter_token_",
            "queue_time_",
            "request_duration_",
            "output_length_",
        ),
        "A choice is one of the `n` answers of a request. The first token of a choice counts when it is sent to the "
        "client, later ones when the engine has them. A preempted choice continues to count from its last token. "
        "Queue time, lengths and duration are recorded when a choice ends; prompts count once per request.",
    ),
    Group("KV cache", ("kv_",)),
    Group(
        "Pages in host memory",
        ("host_pages", "host_pages_", "pushed_pages_", "pushes_"),
        "Present with `host_cache_mib`. Replicas push pages with `num_prefill_replicas`.",
    ),
    Group("Steps", ("steps", "tokens_", "schedule_", "pack_", "transport_", "device_", "commit_", "mask_")),
    Group("Start", ("start_",)),
    Group("Speculation", ("draft_",), "Present with `speculative_algorithm`."),
    Group("Adapters", ("adapters_", "adapter_"), "Present with `max_loras`."),
    Group(
        "Slots with limited capacity",
        ("picks_", "rank_imbalance_"),
        "Present with `expert_selection: balanced` or `eplb_dispatch: capacity`.",
    ),
    Group("Expert balancing", ("expert_",), "Present with `enable_eplb`."),
    Group(
        "Lost hosts",
        ("hosts_", "rebuilds", "rebuild_", "requests_carried_over"),
        "Present where workers run in processes of their own.",
    ),
    Group(
        "Replicas",
        ("replica_",),
        "With several replicas, one of them answers for all, and each metric has the label `replica`. A replica whose "
        "process ended has no `replica_up` until its successor runs: alert where "
        "`count(rayserve_moe_replica_up == 1)` is below the number of replicas.",
    ),
    Group(
        "Journal",
        ("journal_",),
        "Present with the setting `journal`. `journal_entries`, `journal_bytes` and `journal_requests_dropped_total` "
        "describe the one journal of all replicas, and have no label `replica`.",
    ),
)
INTRODUCTION = """# Metrics

Written from `src/rayserve_moe/observability/metric_texts.py` by `python -m tests.architecture.metrics_page`.
`GET /metrics` answers in Prometheus' text format. Every metric has the label `model_name`. Times are in seconds,
lengths in tokens. A counter with labels of its own appears with the first value that it counts.

| file of `deploy` | purpose |
|---|---|
| `prometheus.yaml` | scrapes the head of each deployment in Kubernetes |
| `prometheus-machine.yaml` | scrapes a server on one machine |
| `kuberay/monitoring` | a `ServiceMonitor` for the Prometheus operator |
| `grafana.json` | a board with panels by cluster and replica |
| `alerts.yaml` | alert rules |
"""
OF_VLLM = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_usage_ratio",
    "num_preemptions_total": "preemptions",
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "tokens_sampled",
    "prefix_cache_queries_total": "prompt_tokens",
    "prefix_cache_hits_total": "prompt_tokens_cached",
    "request_success_total": "choices_finished",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
    "e2e_request_latency_seconds": "request_duration_seconds",
    "request_prompt_tokens": "prompt_length_tokens",
    "request_generation_tokens": "output_length_tokens",
}
"""Our metric for each of vLLM's."""
VLLM_NOTE = """
The label `reason` is vLLM's `finished_reason`. Bounds of buckets differ. vLLM has one series per `engine`; here data
ranks are added up.
"""


def page() -> str:
    """Return the page's text."""
    found = [name for group in GROUPS for name in _names(group)]
    assert sorted(found) == sorted(METRICS), f"name each metric in one group: {sorted(set(METRICS) ^ set(found))}"
    parts = [INTRODUCTION, *(line for group in GROUPS for line in _section(group))]
    parts += ["## For boards made for vLLM", "", "| vLLM | here |", "|---|---|"]
    parts += [f"| `vllm:{theirs}` | `{PREFIX}{METRICS[ours].sample}` |" for theirs, ours in OF_VLLM.items()]
    return "\n".join([*parts, VLLM_NOTE])


def _names(group: Group) -> list[str]:
    return [name for name in METRICS if any(name == start or _begins(name, start) for start in group.starts)]


def _begins(name: str, start: str) -> bool:
    return start.endswith("_") and name.startswith(start)


def _section(group: Group) -> Iterator[str]:
    yield from (f"## {group.title}", "")
    if group.note:
        yield from (textwrap.fill(group.note, MAX_COLUMNS), "")
    yield from ("| metric | kind | labels | meaning |", "|---|---|---|---|")
    yield from (_row(METRICS[name]) for name in _names(group))
    yield ""


def _row(metric: MetricText) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{PREFIX}{metric.sample}` | {metric.kind} | {labels} | {metric.text} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
