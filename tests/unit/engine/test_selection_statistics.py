"""What became of picks where slots have limited room is told in numbers that add up over steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from rayserve_moe.config.settings import CacheSettings, Settings
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.engine.step_clock import selection_statistics
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.metrics import EngineMetrics
from tests.support.devices.counting_executor import CARD, CountingExecutor


def statistics_after_three_tokens(executor: CountingExecutor) -> tuple[dict[str, float], dict[str, object]]:
    loop = EngineLoop(executor, CARD, settings=Settings(cache=CacheSettings(page_size=4)))
    is_done = threading.Event()

    def receive(updates: list[ChoiceResult]) -> None:
        if any(update.finish for update in updates):
            is_done.set()

    prompt = GenerationRequest("r", np.array([1, 2], np.int32), SamplingParams(max_new_tokens=3))
    try:
        loop.submit(prompt, receive)
        assert is_done.wait(600)
        families = {family.name: family for family in EngineMetrics(loop, {}).collect()}
        return loop.statistics(), families
    finally:
        loop.shutdown()


def test_steps_add_up():
    executor = CountingExecutor()
    executor.tally = np.array([10, 5, 8, 8], np.int64)
    numbers, families = statistics_after_three_tokens(executor)
    assert numbers["picks_kept_share"] == 0.5
    assert numbers["picks_rerouted"] == 3 * numbers["steps"]
    assert numbers["picks_unfilled"] == 2 * numbers["steps"]
    assert numbers["rank_imbalance"] == 1.0
    for name in ("picks_rerouted", "picks_unfilled"):
        assert isinstance(families[f"rayserve_moe_{name}"], CounterMetricFamily)
    for name in ("picks_kept_ratio", "rank_imbalance_ratio"):
        assert isinstance(families[f"rayserve_moe_{name}"], GaugeMetricFamily)


def test_without_limits_nothing_is_told():
    numbers, families = statistics_after_three_tokens(CountingExecutor())
    assert "picks_kept_share" not in numbers and "rayserve_moe_picks_rerouted" not in families


@pytest.mark.parametrize(
    ("tally", "share", "imbalance"), [((0, 0, 0, 0), 1.0, 1.0), ((8, 0, 0, 0), 0.0, 1.0), ((8, 8, 8, 4), 1.0, 2.0)]
)
def test_shares_of_nothing_are_defined(tally, share, imbalance):
    numbers = selection_statistics(np.array(tally), num_ranks=4)
    assert (numbers["picks_kept_share"], numbers["rank_imbalance"]) == (share, imbalance)
