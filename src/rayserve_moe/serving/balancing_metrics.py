"""Expert balancing as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rayserve_moe.engine.expert_balancing import ExpertBalancing

_PREFIX = "rayserve_moe_expert"


class BalancingMetrics(Collector):
    """Imbalances by layer and over layers, under the placement in force and the one before; what was done, and refused.

    An imbalance is the load of the hottest device over the mean one, with the tokens of the window.
    """

    def __init__(self, balancing: ExpertBalancing) -> None:
        self._balancing = balancing

    def describe(self) -> list[Metric]:
        """Registering asks for no numbers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every number as it is now."""
        view = self._balancing.view()
        by_placement = {"before": view.imbalance_before, "now": view.imbalance_now}
        of_layers = GaugeMetricFamily(
            f"{_PREFIX}_imbalance", "hottest device over the mean one", labels=["placement", "layer"]
        )
        largest = GaugeMetricFamily(f"{_PREFIX}_imbalance_max", "of the hottest layer", labels=["placement"])
        mean = GaugeMetricFamily(f"{_PREFIX}_imbalance_mean", "mean over layers", labels=["placement"])
        for placement, imbalances in by_placement.items():
            for layer_id, imbalance in zip(view.layer_ids, imbalances, strict=True):
                of_layers.add_metric([placement, str(layer_id)], imbalance)
            largest.add_metric([placement], max(imbalances, default=1.0))
            mean.add_metric([placement], sum(imbalances) / max(1, len(imbalances)))
        refused = CounterMetricFamily(f"{_PREFIX}_plans_refused", "plans not followed", labels=["reason"])
        for reason, count in view.actor.refused.items():
            refused.add_metric([reason], count)
        yield from (of_layers, largest, mean, refused)
        yield GaugeMetricFamily(f"{_PREFIX}_balancer_up", "whether the planner answers", value=view.actor.alive)
        for name, (meaning, value) in self._totals(view.actor.restarts).items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)

    def _totals(self, num_restarts: int) -> dict[str, tuple[str, float]]:
        totals = self._balancing.history.totals
        return {
            "rebalances_begun": ("plans followed", totals["begun"]),
            "rebalances_finished": ("plans followed to their end", totals["finished"]),
            "rebalances_replaced": ("plans followed until there was another", totals["replaced"]),
            "rebalances_failed": ("plans given up", totals["failed"]),
            "slots_moved": ("slots that got another expert", totals["moved"]),
            "planning_seconds": ("seconds from asking for plans to their answers", self._balancing.planning_s),
            "balancer_restarts": ("times that a lost planner was found again", num_restarts),
        }
