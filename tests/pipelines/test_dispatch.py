"""Which of an expert's slots a token takes is a setting, and shows in no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.checkpoints.files import read_config
from rayserve_moe.config.load import settings_from
from rayserve_moe.execution.card import model_card
from rayserve_moe.execution.host_runner import HostRunner, RunnerSettings
from rayserve_moe.execution.migration import EXPERT_NAMES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.requests import GenerationRequest, ModelCard
from tests.support.checkpoints import CORE_CONFIG, NUM_PAGES, PAGE_SIZE
from tests.support.drive import Way, run_together
from tests.support.outcomes import Outcomes
from tests.support.workload import draw_prompt, request_for

pytestmark = pytest.mark.slow  # slots take no other path through the backends, whose tests choose them each way

DISPATCHES = ("shares", "static", "first")
NUM_ROWS, STEP_TOKENS = 16, 32
WAY = Way(num_rows=NUM_ROWS, step_tokens=STEP_TOKENS, chunk_tokens=STEP_TOKENS)
SIZES = MappingProxyType(
    {
        "expert_backend": "all_to_all",
        "num_redundant_experts": 4,
        "max_running_requests": NUM_ROWS,
        "max_step_tokens": STEP_TOKENS,
        "precompile_bs_paddings": [NUM_ROWS],
        "page_size": PAGE_SIZE,
        "num_pages": NUM_PAGES,
        "enable_return_routed_experts": True,
    }
)


def requests() -> list[GenerationRequest]:
    generator = np.random.default_rng(5)
    return [request_for(draw_prompt(generator, length), f"r{length}", max_new_tokens=8) for length in (1, 20, 40, 61)]


@pytest.fixture(scope="module")
def card(core_checkpoint: Path) -> ModelCard:
    found = settings_from({"model_path": core_checkpoint, **SIZES})
    spec = spec_from_config(read_config(core_checkpoint))
    return model_card(spec, model=found.model, replay=found.replay, name="core", eos_token_ids=(2,))


@pytest.fixture(scope="module")
def runners(core_checkpoint: Path, kernel_settings: dict[str, str]) -> dict[str, HostRunner]:
    def prepared(dispatch: str) -> HostRunner:
        found = settings_from({"model_path": core_checkpoint, "eplb_dispatch": dispatch, **SIZES, **kernel_settings})
        settings = RunnerSettings(found.model, found.scheduler, found.cache, found.replay, found.experts, found.compile)
        runner = HostRunner(settings, plan_for(jax.devices()[:4], data_size=2))
        runner.prepare(runner.load())
        return runner

    return {dispatch: prepared(dispatch) for dispatch in DISPATCHES}


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
        spoilt = {name: jnp.where(is_first[:, None, None], experts[name], 0) for name in EXPERT_NAMES}
        spoilt = {name: jax.device_put(value, experts[name].sharding) for name, value in spoilt.items()}
        runner.weights = replace(weights, params={**weights.params, "experts": {**experts, **spoilt}})
        try:
            assert same(whole, run_together(runner, card, requests(), way=WAY)) == (dispatch == "first")
        finally:
            runner.weights = weights
        assert runner.config.experts.slot_choice == dispatch
