"""Tests which layouts keep the bits of results with `invariant_products`.

`docs/rl/invariance.md` has the table. Other layouts still give the same ids and rows here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.requests.records import ModelCard
from tests.pipelines.test_spread import spread_over
from tests.support.engine.host_runners import WAY, card_of
from tests.support.engine.outputs import Outcomes, assert_all_same, assert_identical
from tests.support.engine.run_requests import run_alone, run_together
from tests.support.engine.workload import mixed_workload
from tests.support.experts.placements import Spread

pytestmark = pytest.mark.slow

ON_ONE, ON_TWO, ON_FOUR = Spread(1, 1), Spread(2, 1, "all_to_all", 8), Spread(4, 1, "all_to_all", 8)
"""Data ranks of one device each. Experts of several ranks may move."""
TENSOR_RANKS = Spread(1, 2, "all_to_all", 8)
Run = Callable[[Spread], HostRunner]


@pytest.fixture(scope="module")
def card(core_checkpoint: Path) -> ModelCard:
    return card_of(core_checkpoint)


@pytest.fixture(scope="module")
def runner_over(core_checkpoint: Path, is_native: bool) -> Run:
    """Compile a runner over the devices of a layout, with its placement of experts."""

    kernels = "native" if is_native else "off"

    @cache
    def prepared(spread: Spread) -> HostRunner:
        return spread_over(core_checkpoint, spread, invariant_products="on", cpu_kernels=kernels)

    return prepared


def together(runner: HostRunner, card: ModelCard) -> Outcomes:
    return run_together(runner, card, mixed_workload(), way=WAY)


@pytest.mark.parametrize("spread", [ON_TWO, ON_FOUR], ids=str)
def test_steps_over_data_ranks_do_not_show_in_any_bit(runner_over: Run, card: ModelCard, spread: Spread):
    """Compare requests alone with requests in a batch, where their ranks, steps and neighbours differ."""
    runner = runner_over(spread)
    assert_identical(together(runner, card), run_alone(runner, card, mixed_workload(), way=WAY))


@pytest.mark.parametrize("spread", [ON_TWO, ON_FOUR], ids=str)
def test_a_placement_of_experts_that_may_move_does_not_show_in_any_bit(
    runner_over: Run, card: ModelCard, spread: Spread
):
    moved = together(runner_over(replace(spread, shuffled=True)), card)
    assert_identical(moved, together(runner_over(spread), card))


def test_another_number_of_data_ranks_shows_in_log_probs(runner_over: Run, card: ModelCard):
    """Each device adds up its shard of the vocabulary, so the parts of the sum differ."""
    assert_shows_in_log_probs(together(runner_over(ON_TWO), card), together(runner_over(ON_ONE), card))


@pytest.mark.float32("devices add up parts of sums")
def test_tensor_ranks_show_in_log_probs(runner_over: Run, card: ModelCard):
    assert_shows_in_log_probs(together(runner_over(TENSOR_RANKS), card), together(runner_over(ON_ONE), card))


def assert_shows_in_log_probs(actual: Outcomes, expected: Outcomes) -> None:
    """Assert that ids and rows are equal, and some log-probs are not equal to the last bit."""
    assert_all_same(actual, expected)
    assert any(outcome.logprobs != expected[key].logprobs for key, outcome in actual.items())
