"""Prometheus metrics of the engine, the HTTP front end and expert balancing, labelled with the model."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from rayserve_moe.engine.eplb.control import EplbControl
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.fleet.journal_client import JournalClient
from rayserve_moe.observability.metrics import HistogramState

PREFIX = "rayserve_moe"
MODEL = "model_name"
"""Label of every metric, named as in vLLM."""
REPLICA = "replica"
"""Label of the replica if several serve."""

GAUGES = {
    "pages_total": ("kv_pages", "KV pages of all data ranks; windowed layers keep fewer"),
    "pages_free": ("kv_pages_free", "KV pages that no running choice holds"),
    "pages_cached": ("kv_pages_cached", "KV pages that hold cached prefixes"),
    "tokens_in_use": ("kv_tokens_in_use", "tokens of running choices with keys and values in pages"),
    "requests_live": ("requests_live", "requests in the engine"),
    "requests_running": ("requests_running", "choices that own a row"),
    "requests_waiting": ("requests_waiting", "choices that wait for a row"),
    "hosts_missing": ("hosts_missing", "lost hosts without which the group continues"),
    "paused": ("paused", "1 while generation is paused"),
    "picks_kept_share": ("picks_kept_ratio", "fraction of expert selections unchanged by slot limits"),
    "rank_imbalance": (
        "rank_imbalance_ratio",
        "expert selections of the hottest rank divided by the mean, over all steps",
    ),
    "start_load_s": ("start_load_seconds", "time of loading weights"),
    "start_compile_s": ("start_compile_seconds", "wall time of compiling"),
    "start_compile_sum_s": ("start_compile_work_seconds", "sum of the compile times of all programs"),
    "start_first_run_s": ("start_first_run_seconds", "time of running every program once"),
    "start_num_programs": ("start_programs", "programs of the start"),
    "start_num_programs_found": ("start_programs_found", "programs of the start found on disk"),
}
COUNTERS = {
    "preemptions": ("preemptions", "preemptions of running choices"),
    "steps": ("steps", "steps computed"),
    "tokens_computed": ("tokens_computed", "tokens computed, including prompts, without cached tokens"),
    "tokens_sampled": ("tokens_sampled", "tokens sampled"),
    "schedule_s": ("schedule_seconds", "time spent planning steps"),
    "pack_s": ("pack_seconds", "time spent packing steps"),
    "transport_s": ("transport_seconds", "time of steps and results in transport"),
    "device_s": ("device_seconds", "time spent waiting for devices"),
    "commit_s": ("commit_seconds", "time spent committing results"),
    "mask_s": ("mask_seconds", "time spent filling masks of constrained answers"),
    "picks_rerouted": ("picks_rerouted", "expert selections that full slots moved to another expert"),
    "rebuilds": ("rebuilds", "number of replacements of lost hosts"),
    "requests_carried_over": ("requests_carried_over", "choices continued after a replacement of hosts"),
    "rebuild_s": ("rebuild_seconds", "time of replacing hosts"),
    "picks_unfilled": ("picks_unfilled", "expert selections without a slot"),
}
"""Engine statistics: metric name without the package's prefix, and description."""

JOURNAL_GAUGES = {
    "up": "1 while requests are kept in the journal",
    "entries": "requests that the journal keeps",
    "bytes": "bytes in the journal",
}
JOURNAL_COUNTERS = {
    "resumed": "requests resumed on this replica",
    "dropped": "requests that did not fit into the journal",
    "lost": "answers lost with a journal",
}
SHARED = frozenset(f"{PREFIX}_journal_{name}" for name in ("entries", "bytes", "requests_dropped"))
"""Metrics of the common journal, equal on all replicas."""


class EngineMetrics(Collector):
    """Collector of engine statistics, request latencies, and answers by route and status."""

    def __init__(self, loop: EngineLoop, answered: Mapping[tuple[str, int], int]) -> None:
        self._loop, self._answered = loop, answered

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registration collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        card = self._loop.card
        model = card.name
        versions = {"version": package_version()} | {name: package_version(name) for name in ("jax", "ray")}
        yield _gauge(
            "build_info", "1, labelled with versions of packages", {tuple(versions.values()): 1}, model, *versions
        )
        meaning = "1, labelled with the version of the weights that serve"
        yield _gauge("weight_version_info", meaning, {(card.weight_version,): 1}, model, "weight_version")
        statistics = self._loop.statistics()
        for key, value in statistics.items():
            name, meaning = GAUGES.get(key) or COUNTERS[key]
            yield (_gauge if key in GAUGES else _counter)(name, meaning, {(): value}, model)
        used = 1 - statistics["pages_free"] / max(1.0, statistics["pages_total"])
        yield _gauge("kv_usage_ratio", "fraction of KV pages held by running choices", {(): used}, model)
        yield from self._of_requests(model)
        yield from self._of_drafts(model)
        if (recovery := self._loop.recovery) is not None:
            by_phase = {(phase,): seconds for phase, seconds in recovery.phase_seconds.items()}
            yield _counter("rebuild_phase_seconds", "time of replacing hosts by phase", by_phase, model, "phase")
        yield _counter("http_requests", "answers by route and status", dict(self._answered), model, "route", "status")

    def _of_requests(self, model: str) -> Iterator[Metric]:
        measured = self._loop.request_metrics
        histograms = {
            "time_to_first_token_seconds": ("time from a request to its first token", measured.time_to_first_token),
            "inter_token_latency_seconds": ("time between consecutive tokens of a choice", measured.inter_token),
            "queue_time_seconds": ("time of a choice waiting for a row", measured.queue_time),
            "request_duration_seconds": ("time from a request to the end of a choice", measured.end_to_end),
            "prompt_length_tokens": ("tokens of a prompt", measured.prompt_tokens),
            "output_length_tokens": ("output tokens of a choice", measured.output_tokens),
        }
        for name, (meaning, histogram) in histograms.items():
            yield _histogram(name, meaning, histogram.state(), model)
        ends = {(kind,): count for kind, count in Counter(measured.finished).items()}
        yield _counter("choices_finished", "ended choices by finish reason", ends, model, "reason")
        prompts, cached = measured.num_prompt_tokens, measured.num_cached_tokens
        yield _counter("prompt_tokens", "tokens of the prompts of ended requests", {(): prompts}, model)
        yield _counter("prompt_tokens_cached", "prompt tokens found in the cache", {(): cached}, model)

    def _of_drafts(self, model: str) -> Iterator[Metric]:
        if self._loop.drafts is None:
            return
        proposer, totals = self._loop.drafts
        counters = {
            "draft_chains": ("verifications of a choice's drafts", totals.chains),
            "draft_tokens": ("tokens drafted and verified", totals.drafted),
            "draft_tokens_accepted": ("draft tokens accepted", totals.accepted),
            "draft_seconds": ("time spent drafting", totals.draft_s),
        }
        for name, (meaning, value) in counters.items():
            yield _counter(name, meaning, {(proposer,): value}, model, "proposer")
        length = {(proposer,): 1 + totals.accepted / max(1, totals.chains)}
        yield _gauge("draft_accepted_length", "tokens per verification, on average", length, model, "proposer")


class BalancingMetrics(Collector):
    """Collector of expert imbalance by layer under the current and the previous placement, and of plans.

    An imbalance is the load of the hottest device divided by the mean, over the tokens of the window.
    """

    def __init__(self, balancing: EplbControl, *, model: str) -> None:
        self._balancing, self._model = balancing, model

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registration collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        view, totals, model = self._balancing.view(), self._balancing.history.totals, self._model
        by_placement = {"before": view.imbalance_before, "now": view.imbalance_now}
        by_layer = {
            (placement, layer_id): imbalance
            for placement, imbalances in by_placement.items()
            for layer_id, imbalance in zip(view.layer_ids, imbalances, strict=True)
        }
        largest = {(placement,): max(values, default=1.0) for placement, values in by_placement.items()}
        mean = {(placement,): sum(values) / max(1, len(values)) for placement, values in by_placement.items()}
        meaning = "load of the hottest device divided by the mean"
        yield _gauge("expert_imbalance", meaning, by_layer, model, "placement", "layer")
        yield _gauge("expert_imbalance_max", "maximum over layers of the load imbalance", largest, model, "placement")
        yield _gauge("expert_imbalance_mean", "mean over layers of the load imbalance", mean, model, "placement")
        yield _gauge("expert_balancer_up", "1 while the planner answers", {(): view.actor.alive}, model)
        refused = {(reason,): count for reason, count in view.actor.refused.items()}
        yield _counter("expert_plans_refused", "plans not followed", refused, model, "reason")
        counters = {
            "rebalances_begun": ("plans followed", totals["begun"]),
            "rebalances_finished": ("plans followed to their end", totals["finished"]),
            "rebalances_replaced": ("plans replaced by another plan", totals["replaced"]),
            "rebalances_failed": ("plans that failed", totals["failed"]),
            "slots_moved": ("slots that received another expert", totals["moved"]),
            "planning_seconds": ("time of plan requests", self._balancing.planning_s),
            "balancer_restarts": ("reconnections to a restarted planner", view.actor.restarts),
        }
        for name, (meaning, value) in counters.items():
            yield _counter(f"expert_{name}", meaning, {(): value}, model)


def _gauge(name: str, meaning: str, values: Mapping[tuple, float], model: str, *labels: str) -> Metric:
    return _family(GaugeMetricFamily, name, meaning, values, [model, *labels])


def _counter(name: str, meaning: str, values: Mapping[tuple, float], model: str, *labels: str) -> Metric:
    return _family(CounterMetricFamily, name, meaning, values, [model, *labels])


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    meaning: str,
    values: Mapping[tuple, float],
    model_and_labels: Sequence[str],
) -> Metric:
    model, *labels = model_and_labels
    family = kind(f"{PREFIX}_{name}", meaning, labels=[MODEL, *labels])
    for label_values, value in values.items():
        family.add_metric([model, *map(str, label_values)], value)
    return family


def _histogram(name: str, meaning: str, state: HistogramState, model: str) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", meaning, labels=[MODEL])
    bounds = ["+Inf" if math.isinf(bound) else repr(float(bound)) for bound in state.bounds]
    family.add_metric([model], list(zip(bounds, state.at_or_below, strict=True)), state.total)
    return family


class JournalMetrics(Collector):
    """Collector of this replica's view of the journal."""

    def __init__(self, journal: JournalClient, *, model: str) -> None:
        self._journal, self._model = journal, model

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registration collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        found = self._journal.statistics()
        for name, meaning in JOURNAL_GAUGES.items():
            yield _gauge(f"journal_{name}", meaning, {(): found[name]}, self._model)
        for name, meaning in JOURNAL_COUNTERS.items():
            yield _counter(f"journal_requests_{name}", meaning, {(): found[name]}, self._model)


@functools.cache
def package_version(name: str = "rayserve_moe") -> str:
    """Return the installed version of a package, by default this one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def metrics_of(
    loop: EngineLoop, answered: Mapping[tuple[str, int], int], *, journal: JournalClient | None = None
) -> list[Metric]:
    """Return all current metrics of an engine, its HTTP front end and its journal."""
    registry = CollectorRegistry()
    if journal is not None:
        registry.register(JournalMetrics(journal, model=loop.card.name))
    registry.register(EngineMetrics(loop, answered))
    if loop.eplb.moves_experts:
        registry.register(BalancingMetrics(loop.eplb_control, model=loop.card.name))
    return list(registry.collect())


class Collected(Collector):
    """Collector of metrics that are already collected."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registration collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        return iter(self._metrics)


def merged(by_replica: Mapping[str, Sequence[Metric]], missing: Sequence[str] = ()) -> list[Metric]:
    """Return the metrics of several replicas as a single list, with the replica as a label and a family per name.

    Shared metrics appear once, with the maximum value. `replica_up` is 0 for missing replicas.
    """
    families: dict[str, Metric] = {}
    for replica, metrics in by_replica.items():
        for metric in metrics:
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            if metric.name in SHARED:
                family.samples = max(family.samples, metric.samples, key=lambda found: [one.value for one in found])
            else:
                family.samples += [one._replace(labels={**one.labels, REPLICA: replica}) for one in metric.samples]
    model = next((one.labels[MODEL] for family in families.values() for one in family.samples), "")
    up = GaugeMetricFamily(f"{PREFIX}_replica_up", "1 for a replica that answers", labels=[MODEL, REPLICA])
    for replica, value in [*((name, 1) for name in by_replica), *((name, 0) for name in missing)]:
        up.add_metric([model, replica], value)
    return [up, *families.values()]
