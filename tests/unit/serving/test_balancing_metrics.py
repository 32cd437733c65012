"""What Prometheus is told of balancing is what balancing itself tells."""

from __future__ import annotations

import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.balancing.planning import LocalPlanner, PlanningConfig, RefusedPlanError
from rayserve_moe.engine.eplb.control import EplbControl
from rayserve_moe.engine.eplb.steps import COUNTS_EVERY, EplbSteps
from rayserve_moe.serving.metrics import BalancingMetrics
from tests.support.experts.eplb_proposals import CountedSteps

WITHIN_S = 600.0
LAYER_IDS = (1, 3)


def scraped(balancing: EplbControl) -> dict[tuple[str, ...], float]:
    """Every sample by its name, without what all names begin with, and the values of its labels."""
    registry = CollectorRegistry()
    registry.register(BalancingMetrics(balancing, model="m"))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    told = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = (sample.labels[name] for name in ("placement", "layer", "reason") if name in sample.labels)
        told[(sample.name.removeprefix("rayserve_moe_expert_"), *labels)] = sample.value
    return told


def test_metrics_are_the_numbers_of_the_view_by_layer_and_over_layers():
    rules = PlanningConfig(interval=32, window=400)
    eplb = EplbSteps(Migration(identity_placement(2, 16, ep_size=4, num_redundant=4), hosts=1, slots_per_step=2))
    steps = CountedSteps(eplb, np.random.default_rng(1).lognormal(sigma=1.0, size=(2, 16)))
    balancing = EplbControl(eplb, LocalPlanner(rules), config=rules, layer_ids=LAYER_IDS)
    assert scraped(balancing)["imbalance_mean", "now"] == 1.0, "before anything was counted"
    deadline = time.monotonic() + WITHIN_S
    while not balancing.view().history or balancing.view().history[0].outcome != "finished":
        assert time.monotonic() < deadline
        steps.run(1)
        time.sleep(0.001)
    balancing.stop()
    balancing._thread.join(WITHIN_S)
    for _ in range(2):
        steps.run(COUNTS_EVERY)
        balancing.view()
    balancing.health.refused["stale"] += 2
    balancing.health.record_refusal(RefusedPlanError("stale", "planted"))

    view, told = balancing.view(), scraped(balancing)
    for placement, imbalances in (("before", view.imbalance_before), ("now", view.imbalance_now)):
        for layer_id, imbalance in zip(LAYER_IDS, imbalances, strict=True):
            assert told["imbalance", placement, str(layer_id)] == pytest.approx(imbalance)
        assert told["imbalance_max", placement] == pytest.approx(max(imbalances))
        assert told["imbalance_mean", placement] == pytest.approx(np.mean(imbalances))
    assert told["rebalances_begun_total",] == len(view.history)
    assert told["slots_moved_total",] == sum(record.moved_slots for record in view.history) > 0
    assert told["plans_refused_total", "stale"] == 3
    assert told["planning_seconds_total",] > 0
    assert (told["balancer_up",], told["balancer_restarts_total",]) == (0, 0), "nobody asks any more"
    actor, realised = view.actor, view.realised
    assert told["plan_problem_time_seconds", "stale"] == balancing.health.problems["stale"].time > 0
    assert told["plan_overdue_periods",] == pytest.approx(actor.overdue_periods)
    assert told["plan_wait_seconds",] == actor.waiting_s == 0 and told["slots_under_way",] == 0
    assert 0 <= told["plan_age_seconds",] < WITHIN_S
    assert told["imbalance_promised",] == realised.imbalance_promised == view.history[-1].imbalance_after
    assert told["imbalance_realised",] == pytest.approx(realised.imbalance_realised)
    assert not [name for name in told if name[0] == "distinct_ranks"], "no routing is captured"
    for layer_id, peak in zip(LAYER_IDS, realised.peak_rows, strict=True):
        assert told["peak_rows_ratio", str(layer_id)] == pytest.approx(peak) and peak > 1
