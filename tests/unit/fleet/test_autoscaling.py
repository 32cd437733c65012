"""Replicas follow the demand that they report, within the bounds that Serve is given."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingContext

from rayserve_moe.config.derive import max_num_replicas
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.engine.command_queue import CommandQueue
from rayserve_moe.engine.page_watch import PageWatch
from rayserve_moe.engine.step_clock import scheduler_statistics
from rayserve_moe.fleet.autoscaling import DEMAND, ByDemand, autoscaling_of, demand_of, demand_on
from rayserve_moe.serving.app import build
from tests.support.engine.schedulers import one, scheduler

ARGS = {"model_path": "preset:tiny"}
BOUNDS = {"num_replicas": 2, "min_replicas": 1, "max_replicas": 4}


def context(demands: dict[str, float] | None, *, now: int) -> AutoscalingContext:
    metrics: Any = None if demands is None else {DEMAND: demands}
    blank = dict.fromkeys(("deployment_id", "deployment_name", "app_name", "config", "policy_state", "raw_metrics"))
    times = dict.fromkeys(("last_scale_up_time", "last_scale_down_time", "current_time"))
    return AutoscalingContext(
        **blank,
        **times,
        current_num_replicas=now,
        target_num_replicas=now,
        running_replicas=[],
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics=metrics,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=100,
    )


def test_the_scarcer_of_rows_and_pages_is_the_demand():
    assert demand_on(num_requests=8, max_requests=16, num_tokens=10, max_tokens=100) == 0.5
    assert demand_on(num_requests=8, max_requests=16, num_tokens=250, max_tokens=100) == 2.5


def test_a_prompt_counts_once_however_much_of_it_is_computed():
    """Pages are taken whole, so that the last one has tokens that are still to be computed."""
    pool = scheduler(page_size=64, chunk_tokens=32, step_tokens=32, max_tokens=256, num_pages=9, num_rows=8)
    cycle: Any = SimpleNamespace(scheduler=pool)
    watch = PageWatch(cycle, CommandQueue())

    def statistics() -> dict[str, float]:
        return scheduler_statistics(pool)

    loop: Any = SimpleNamespace(control=SimpleNamespace(pages=watch), statistics=statistics)
    pool.add([one("a", 128)])
    pool.add([one("b", 128)])
    demands = [demand_of(loop)]
    for _ in range(4):
        pool.schedule()
        demands.append(demand_of(loop))
    assert demands == [256 / (8 * 64)] * 5


@pytest.mark.parametrize(
    ("demands", "now", "wanted"),
    [
        (None, 3, 3),
        ({}, 3, 3),
        ({"a": 0.0}, 1, 0),
        ({"a": 0.7}, 1, 1),
        ({"a": 0.71}, 1, 2),
        ({"a": 0.7, "b": 0.7}, 2, 2),
        ({"a": 3.0}, 1, 5),
        ({"a": 0.3, "b": 0.3, "c": 0.0}, 3, 1),
    ],
)
def test_as_few_as_bring_the_mean_to_the_target(demands: dict[str, float] | None, now: int, wanted: int):
    assert ByDemand(0.7)(context(demands, now=now)) == (wanted, {})


def test_the_deployment_has_the_bounds_of_its_settings():
    """None is said to be deprecated to a user, who has no other way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deployment = build({**ARGS, **BOUNDS, "target_demand": 0.5, "downscale_delay_s": 20})._bound_deployment
    config = deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 4)
    assert config.downscale_delay_s == 20 and config.look_back_period_s == 5 and config.metrics_interval_s == 1
    policy: Any = config.policy.get_policy()
    assert policy(**config.policy.policy_kwargs)(context({"a": 0.9}, now=1)) == (2, {})
    assert build(ARGS)._bound_deployment._deployment_config.autoscaling_config is None


@pytest.mark.parametrize("bounds", [{"max_replicas": 1}, {"max_replicas": 4, "min_replicas": 3}])
def test_bounds_that_contradict_each_other_are_refused(bounds: dict[str, int]):
    with pytest.raises(SettingsError, match="num_replicas 2 must lie between"):
        build({**ARGS, "num_replicas": 2, **bounds})


def test_replicas_that_may_come_count_for_journal_and_routers():
    replicas = settings_from({**ARGS, **BOUNDS, "num_replicas": 1}).replicas
    assert max_num_replicas(replicas) == 4 and autoscaling_of(settings_from(ARGS).replicas) is None
