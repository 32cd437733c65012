"""Prometheus metrics of the engine, the HTTP front end and expert balancing, labelled with the model."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from rayserve_moe.engine.eplb.control import BalancingView, EplbControl
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.fleet.journal_client import JournalClient
from rayserve_moe.observability.metric_texts import METRICS
from rayserve_moe.observability.metrics import HistogramState

PREFIX = "rayserve_moe"
MODEL = "model_name"
"""Label of every metric, named as in vLLM."""
REPLICA = "replica"
"""Label of the replica if several serve."""

RENAMED = {
    "pages_total": "kv_pages",
    "pages_free": "kv_pages_free",
    "pages_cached": "kv_pages_cached",
    "host_pages_total": "host_pages",
    "tokens_in_use": "kv_tokens_in_use",
    "picks_kept_share": "picks_kept_ratio",
    "rank_imbalance": "rank_imbalance_ratio",
    "start_load_s": "start_load_seconds",
    "start_compile_s": "start_compile_seconds",
    "start_compile_sum_s": "start_compile_work_seconds",
    "start_first_run_s": "start_first_run_seconds",
    "start_num_programs": "start_programs",
    "start_num_programs_found": "start_programs_found",
    "schedule_s": "schedule_seconds",
    "pack_s": "pack_seconds",
    "transport_s": "transport_seconds",
    "device_s": "device_seconds",
    "commit_s": "commit_seconds",
    "mask_s": "mask_seconds",
    "rebuild_s": "rebuild_seconds",
}
"""Metrics of engine statistics that have another name."""
OF_JOURNAL = {
    "up": "journal_up",
    "entries": "journal_entries",
    "bytes": "journal_bytes",
    "resumed": "journal_requests_resumed",
    "dropped": "journal_requests_dropped",
    "lost": "journal_requests_lost",
}
"""Metrics of the journal's statistics."""
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
        versions = (package_version(), *map(package_version, ("jax", "ray")))
        yield _family("build_info", {versions: 1}, model=model)
        yield _family("weight_version_info", {(card.weight_version,): 1}, model=model)
        statistics = self._loop.statistics()
        for key, value in statistics.items():
            yield _family(RENAMED.get(key, key), {(): value}, model=model)
        used = 1 - statistics["pages_free"] / max(1.0, statistics["pages_total"])
        yield _family("kv_usage_ratio", {(): used}, model=model)
        yield from self._of_requests(model)
        yield from self._of_drafts(model)
        if (recovery := self._loop.recovery) is not None:
            by_phase = {(phase,): seconds for phase, seconds in recovery.phase_seconds.items()}
            yield _family("rebuild_phase_seconds", by_phase, model=model)
        yield _family("http_requests", dict(self._answered), model=model)

    def _of_requests(self, model: str) -> Iterator[Metric]:
        measured = self._loop.request_metrics
        histograms = {
            "time_to_first_token_seconds": measured.time_to_first_token,
            "inter_token_latency_seconds": measured.inter_token,
            "queue_time_seconds": measured.queue_time,
            "request_duration_seconds": measured.end_to_end,
            "prompt_length_tokens": measured.prompt_tokens,
            "output_length_tokens": measured.output_tokens,
        }
        for name, histogram in histograms.items():
            yield _histogram(name, histogram.state(), model=model)
        ends = {(kind,): count for kind, count in Counter(measured.finished).items()}
        yield _family("choices_finished", ends, model=model)
        yield _family("prompt_tokens", {(): measured.num_prompt_tokens}, model=model)
        yield _family("prompt_tokens_cached", {(): measured.num_cached_tokens}, model=model)

    def _of_drafts(self, model: str) -> Iterator[Metric]:
        if self._loop.drafts is None:
            return
        proposer, totals = self._loop.drafts
        values = {
            "draft_chains": totals.chains,
            "draft_tokens": totals.drafted,
            "draft_tokens_accepted": totals.accepted,
            "draft_seconds": totals.draft_s,
            "draft_accepted_length": 1 + totals.accepted / max(1, totals.chains),
        }
        for name, value in values.items():
            yield _family(name, {(proposer,): value}, model=model)


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
        view, totals = self._balancing.view(), self._balancing.history.totals
        by_placement = {"before": view.imbalance_before, "now": view.imbalance_now}
        by_layer = {
            (placement, layer_id): imbalance
            for placement, imbalances in by_placement.items()
            for layer_id, imbalance in zip(view.layer_ids, imbalances, strict=True)
        }
        families: dict[str, Mapping[tuple, float]] = {
            "imbalance": by_layer,
            "imbalance_max": {(placement,): max(values, default=1.0) for placement, values in by_placement.items()},
            "imbalance_mean": {
                (placement,): sum(values) / max(1, len(values)) for placement, values in by_placement.items()
            },
            "balancer_up": {(): view.actor.alive},
            "plans_refused": {(reason,): count for reason, count in view.actor.refused.items()},
            "rebalances_begun": {(): totals["begun"]},
            "rebalances_finished": {(): totals["finished"]},
            "rebalances_replaced": {(): totals["replaced"]},
            "rebalances_failed": {(): totals["failed"]},
            "slots_moved": {(): totals["moved"]},
            "planning_seconds": {(): self._balancing.planning_s},
            "balancer_restarts": {(): view.actor.restarts},
            **_health_of(
                view, {(reason,): each.time for reason, each in self._balancing.health.problems.copy().items()}
            ),
        }
        for name, values in families.items():
            yield _family(f"expert_{name}", values, model=self._model)


def _health_of(view: BalancingView, problem_times: dict[tuple, float]) -> dict[str, Mapping[tuple, float]]:
    """Return the families of the planner's state and of the placement's effects; unknown values are absent."""
    actor, realised, progress = view.actor, view.realised, view.progress
    known = {
        "plan_age_seconds": actor.plan_age_s,
        "plan_overdue_periods": actor.overdue_periods,
        "plan_wait_seconds": actor.waiting_s,
        "slots_under_way": 0 if progress.is_done else progress.num_slots - progress.num_slots_done,
        "imbalance_promised": realised.imbalance_promised,
        "imbalance_realised": realised.imbalance_realised,
    }
    by_layer = {"distinct_ranks": realised.distinct_ranks or [], "peak_rows_ratio": realised.peak_rows}
    return {
        "plan_problem_time_seconds": problem_times,
        **{name: {} if value is None else {(): value} for name, value in known.items()},
        **{
            name: {(layer_id,): value for layer_id, value in zip(view.layer_ids, values, strict=False)}
            for name, values in by_layer.items()
        },
    }


def _family(name: str, values: Mapping[tuple, float], *, model: str) -> Metric:
    """Return a gauge or a counter. Args: values: by the values of its labels besides the model's name."""
    declared = METRICS[name]
    kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    family = kind(f"{PREFIX}_{name}", declared.text, labels=[MODEL, *declared.labels])
    for label_values, value in values.items():
        family.add_metric([model, *map(str, label_values)], value)
    return family


def _histogram(name: str, state: HistogramState, *, model: str) -> Metric:
    family = HistogramMetricFamily(f"{PREFIX}_{name}", METRICS[name].text, labels=[MODEL])
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
        for key, name in OF_JOURNAL.items():
            yield _family(name, {(): found[key]}, model=self._model)


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
    answers = {(replica,): 1 for replica in by_replica} | {(replica,): 0 for replica in missing}
    return [_family("replica_up", answers, model=model), *families.values()]
