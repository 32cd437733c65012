"""Which of an expert's slots a token takes is a setting, and shows in no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.model.layers.moe import slot_specs
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.outputs import Outcomes
from tests.support.engine.run_requests import run_together
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.models.core import CORE_CONFIG

pytestmark = pytest.mark.slow  # slots take no other path through the backends, whose tests choose them each way

DISPATCHES = ("shares", "static", "first")
SIZES = MappingProxyType({**TWO_SHAPES, "expert_backend": "all_to_all", "num_redundant_experts": 4})


def requests() -> list[GenerationRequest]:
    generator = np.random.default_rng(5)
    return [request_for(draw_prompt(generator, length), f"r{length}", max_new_tokens=8) for length in (1, 20, 40, 61)]


@pytest.fixture(scope="module")
def card(core_checkpoint: Path) -> ModelCard:
    return card_of(core_checkpoint)


@pytest.fixture(scope="module")
def runners(core_checkpoint: Path, kernel_settings: dict[str, str]) -> dict[str, HostRunner]:
    settings = {**SIZES, **kernel_settings, "enable_return_routed_experts": True}
    return {
        dispatch: prepared_runner(core_checkpoint, mesh=(2, 2), eplb_dispatch=dispatch, **settings)
        for dispatch in DISPATCHES
    }


def same(one: Outcomes, other: Outcomes) -> bool:
    """Whether ids, log-probs to the last bit, and routing are the same."""
    return all(
        outcome.ids == other[key].ids
        and np.array_equal(outcome.logprobs, other[key].logprobs)
        and np.array_equal(outcome.rows, other[key].rows)
        for key, outcome in one.items()
    )


def test_answers_are_the_same_bits_whatever_slots_tokens_take(runners, card):
    by_shares, by_rank, first = (run_together(runners[d], card, requests(), way=WAY) for d in DISPATCHES)
    assert same(by_shares, by_rank) and same(by_shares, first)


def test_only_first_does_without_the_weights_of_replicas(runners, card):
    """So the setting reaches the steps: the others miss what lies in the redundant slots, and here that is nothing."""
    for dispatch, runner in runners.items():
        whole = run_together(runner, card, requests(), way=WAY)
        weights, experts = runner.weights, runner.weights.params["experts"]
        is_first = np.arange(runner.config.experts.num_slots) < CORE_CONFIG.num_experts
        spoilt = {name: jnp.where(is_first[:, None, None], experts[name], 0) for name in slot_specs(runner.config.spec)}
        spoilt = {name: jax.device_put(value, experts[name].sharding) for name, value in spoilt.items()}
        runner.weights = replace(weights, params={**weights.params, "experts": {**experts, **spoilt}})
        try:
            assert same(whole, run_together(runner, card, requests(), way=WAY)) == (dispatch == "first")
        finally:
            runner.weights = weights
        assert runner.config.experts.slot_choice == dispatch
