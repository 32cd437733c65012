"""Expert balancing as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rayserve_moe.engine.eplb_control import EplbControl
from rayserve_moe.serving.metrics import MODEL

_PREFIX = "rayserve_moe_expert"


class BalancingMetrics(Collector):
    """Imbalances by layer and over layers, under the placement in force and the one before; what was done, and refused.

    An imbalance is the load of the hottest device over the mean one, with the tokens of the window.
    """

    def __init__(self, balancing: EplbControl, *, model: str) -> None:
        self._balancing, self._model = balancing, model

    def describe(self) -> list[Metric]:
        """Registering asks for no numbers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every number as it is now."""
        view = self._balancing.view()
        by_placement = {"before": view.imbalance_before, "now": view.imbalance_now}
        of_layers = self._gauge("imbalance", "load of the hottest device over the mean one", "placement", "layer")
        largest = self._gauge("imbalance_max", "the same, of the hottest layer", "placement")
        mean = self._gauge("imbalance_mean", "the same, mean over layers", "placement")
        for placement, imbalances in by_placement.items():
            for layer_id, imbalance in zip(view.layer_ids, imbalances, strict=True):
                of_layers.add_metric([self._model, placement, str(layer_id)], imbalance)
            largest.add_metric([self._model, placement], max(imbalances, default=1.0))
            mean.add_metric([self._model, placement], sum(imbalances) / max(1, len(imbalances)))
        up = self._gauge("balancer_up", "1 while the planner answers")
        up.add_metric([self._model], view.actor.alive)
        refused = self._counter("plans_refused", "plans not followed", "reason")
        for reason, count in view.actor.refused.items():
            refused.add_metric([self._model, reason], count)
        yield from (of_layers, largest, mean, up, refused)
        for name, (meaning, value) in self._totals(view.actor.restarts).items():
            total = self._counter(name, meaning)
            total.add_metric([self._model], value)
            yield total

    def _gauge(self, name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, labels=[MODEL, *labels])

    def _counter(self, name: str, meaning: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"{_PREFIX}_{name}", meaning, labels=[MODEL, *labels])

    def _totals(self, num_restarts: int) -> dict[str, tuple[str, float]]:
        totals = self._balancing.history.totals
        return {
            "rebalances_begun": ("plans followed", totals["begun"]),
            "rebalances_finished": ("plans followed to their end", totals["finished"]),
            "rebalances_replaced": ("plans followed until there was another", totals["replaced"]),
            "rebalances_failed": ("plans given up", totals["failed"]),
            "slots_moved": ("slots that got another expert", totals["moved"]),
            "planning_seconds": ("time from asking for plans to their answers", self._balancing.planning_s),
            "balancer_restarts": ("times that a lost planner was found again", num_restarts),
        }
