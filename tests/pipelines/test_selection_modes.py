"""How experts are selected, through the engine: lossless modes change nothing, a balanced one what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.checkpoints.files import read_config
from rayserve_moe.config.load import settings_from
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.step_clock import SelectionTally, selection_statistics
from rayserve_moe.execution.card import model_card
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RequestError
from tests.support.engine.host_runners import TWO_SHAPES, WAY, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_identical, assert_same
from tests.support.engine.run_requests import cycle_for, run_on
from tests.support.engine.shared_settings import ONE_BUCKET
from tests.support.engine.workload import mixed_workload
from tests.support.experts.placements import random_placement

NUM_REDUNDANT = 4
TOPK = {"expert_selection": "topk", "enable_return_routed_experts": True}
BY_ROOM = {"eplb_dispatch": "capacity", "capacity_factor": 0.5, "enable_return_routed_experts": True}
BALANCED = {"expert_selection": "balanced", "capacity_factor": 100.0}


Runners = Callable[..., HostRunner]


@pytest.fixture(scope="module")
def card(core_checkpoint: Path) -> ModelCard:
    found = settings_from({"model_path": core_checkpoint})
    spec = spec_from_config(read_config(core_checkpoint))
    return model_card(spec, model=found.model, replay=found.replay, name="core", eos_token_ids=(2,))


@pytest.fixture(scope="module")
def runner_with(core_checkpoint: Path, kernel_settings: dict[str, str]) -> Runners:
    """Runners on two data ranks with replicas that may move, compiled once each."""

    @cache
    def prepared(backend: str, *chosen: tuple[str, object]) -> HostRunner:
        settings = {
            "expert_backend": backend,
            "num_redundant_experts": NUM_REDUNDANT,
            "enable_eplb": True,
            "eplb_slots_per_step": 1,
        }
        return prepared_runner(
            core_checkpoint, mesh=(2, 1), **TWO_SHAPES, **settings, **dict(chosen), **kernel_settings
        )

    return lambda backend, values: prepared(backend, *values.items())


def few_requests() -> list[GenerationRequest]:
    return [request for request in mixed_workload() if len(request.prompt_ids) < 70][::3]


def run(runner: HostRunner, card: ModelCard, *, seed: int | None = None) -> tuple[Outcomes, np.ndarray | None]:
    """Outcomes and tally; with a `seed` experts move to a random placement and back meanwhile."""
    migration = Migration(runner.placement, hosts=1, slots_per_step=1)
    way = replace(WAY, with_capture=False, eplb=EplbSteps(migration))
    if seed is not None:
        migration.begin(random_placement(runner.placement, seed=seed))
    cycle = cycle_for(runner, card, way)
    outcomes = run_on(cycle, card, few_requests(), intervene=way.intervene)
    cycle.scheduler.flush()
    if seed is not None:
        assert migration.progress.num_layers_done > 0
        migration.begin(runner.placement)
        while (piece := migration.next_piece()) is not None:
            runner.move_experts(piece)
    tally = extension_of(cycle.extensions, SelectionTally)
    return outcomes, None if tally is None else tally._tally


@pytest.mark.slow
def test_replicas_by_room_change_no_bit(runner_with, card):
    expected, no_tally = run(runner_with("all_to_all", TOPK), card)
    found, tally = run(runner_with("all_to_all", BY_ROOM), card)
    assert_identical(found, expected, routing=False)
    assert no_tally is None
    numbers = selection_statistics(tally, num_ranks=2)
    assert (numbers["picks_kept_share"], numbers["picks_rerouted"], numbers["picks_unfilled"]) == (1.0, 0.0, 0.0)
    assert 1.0 <= numbers["rank_imbalance"] < 2.0
    moved, _ = run(runner_with("all_to_all", BY_ROOM), card, seed=5)
    assert_identical(moved, expected, routing=False)


@pytest.mark.slow
@pytest.mark.float32("experts of two devices are added up in another order than those of one")
def test_a_balanced_selection_is_top_k_where_there_is_room_and_another_where_there_is_not(runner_with, card, alone):
    runner = runner_with("fused", BALANCED)
    num_compilations = runner.num_compilations_since_start
    for seed in (None, 6):
        found, tally = run(runner, card, seed=seed)
        for key, outcome in found.items():
            assert_same(outcome, alone[key], routing=False, index=False)
        roomy = selection_statistics(tally, num_ranks=2)
        assert (roomy["picks_kept_share"], roomy["picks_rerouted"], roomy["picks_unfilled"]) == (1.0, 0.0, 0.0)

    before, runner.weights = runner.weights, replace(runner.weights, capacity_factor=np.float32(1.0))
    found, tally = run(runner, card)
    again, _ = run(runner, card)
    runner.weights = before
    assert_identical(found, again, routing=False)
    limited = selection_statistics(tally, num_ranks=2)
    assert limited["picks_kept_share"] < 0.95 and limited["picks_rerouted"] > 0
    assert limited["rank_imbalance"] < roomy["rank_imbalance"]
    assert runner.num_compilations_since_start == num_compilations, "the factor comes at run time"


@pytest.mark.slow
def test_a_balanced_server_tells_what_it_did_and_takes_no_forced_routing(engine_with):
    engine = engine_with(**ONE_BUCKET, **BALANCED, enable_return_routed_experts=False)
    engine.generate(input_ids=[5, 6, 7, 8], max_new_tokens=4)
    numbers = engine.loop.statistics()
    assert numbers["picks_kept_share"] == 1.0 and numbers["rank_imbalance"] == 1.0
    rows = np.tile(np.arange(engine.card.routing.top_k), (4, len(engine.card.routing.layer_ids), 1))
    with pytest.raises(RequestError, match="routing cannot be forced"):
        engine.generate(input_ids=[5, 6, 7, 8], max_new_tokens=1, forced_routed_experts=rows.tolist())
