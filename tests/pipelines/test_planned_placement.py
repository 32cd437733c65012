"""A server starts from a placement file, or moves to one while it answers; its answers do not change by a bit."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine, extract_routed_experts_from_meta_info
from rayserve_moe.balancing.coactivation import ServedGroup, plan_from_rows
from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement
from rayserve_moe.balancing.placement_file import write_placement
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.config.settings import SettingsError
from tests.support.engine.shared_settings import CORE
from tests.support.engine.workload import draw_prompt
from tests.support.experts.eplb_proposals import SPREAD_SETTINGS, SUMMED_CONFIG

WITHIN_S = 600.0
RANKS, REDUNDANT = 4, 4
ASKED = {
    "temperature": 0.0,
    "max_new_tokens": 24,
    "ignore_eos": True,
    "return_logprob": True,
    "return_routed_experts": True,
}
SPREAD = {**SPREAD_SETTINGS, "enable_prefix_caching": False}
MOVED = {"enable_eplb": True, "eplb_interval": 1_000_000}
PROMPTS = [draw_prompt(np.random.default_rng(seed), 20).tolist() for seed in range(4)]


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("skewed") / "model", SUMMED_CONFIG, seed=3, dtype="float32")


def answers_of(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """One after the other, so that the steps are the same each time: how prompts share steps shows in the last bits."""
    answers = [engine.generate(input_ids=prompt, **ASKED) for prompt in PROMPTS]
    return [(answer["output_ids"], answer["meta_info"]["output_token_logprobs"]) for answer in answers]


def rows_of(engine: Engine) -> np.ndarray:
    answers = engine.generate(input_ids=PROMPTS, **ASKED)
    layout = engine.loop.card.routing
    raw = [extract_routed_experts_from_meta_info(answer) for answer in answers]
    rows = np.concatenate([each.reshape(-1, layout.num_hidden_layers, layout.top_k) for each in raw])
    return rows[:, list(layout.layer_ids)].astype(np.uint8)


def run_until_placed(engine: Engine, wanted: ExpertPlacement, expected: list) -> int:
    """Answer until experts are where they should be; returns the number of rounds of answers meanwhile."""
    deadline, num_rounds = time.monotonic() + WITHIN_S, 0
    while (engine.loop.eplb.migration.placement.expert_of_slot != wanted.expert_of_slot).any():
        assert time.monotonic() < deadline
        assert answers_of(engine) == expected
        num_rounds += 1
    return num_rounds


@pytest.mark.slow  # migrations leave the bits as they are: tests/pipelines/test_migration.py
def test_answers_stay_the_same_before_during_and_after_a_switch(skewed, tmp_path):
    with Engine(str(skewed), **SPREAD) as engine:
        expected, rows = answers_of(engine), rows_of(engine)
    num_experts = SUMMED_CONFIG.num_experts
    group = ServedGroup(RANKS, REDUNDANT, batch=8)
    planned = plan_from_rows(rows, group, num_experts=num_experts)
    write_placement(tmp_path / "planned.json", planned)
    start = identity_placement(planned.num_layers, num_experts, ep_size=RANKS, num_redundant=REDUNDANT)
    assert (planned.expert_of_slot != start.expert_of_slot).any(axis=1).all()
    with Engine(str(skewed), **SPREAD, **MOVED, expert_placement=str(tmp_path / "planned.json")) as engine:
        assert run_until_placed(engine, planned, expected) >= 1, "experts move in the first steps"
        assert answers_of(engine) == expected
        view = engine.loop.eplb_control.view()
        assert view.realised.distinct_ranks is not None and 1 <= min(view.realised.distinct_ranks) <= RANKS
        engine.loop.eplb.set_target(start)
        run_until_placed(engine, start, expected)
        assert answers_of(engine) == expected
        assert engine.runner.num_compilations_since_start == 0, "other engines of this process aside"


def test_a_file_that_does_not_fit_is_refused_at_the_start(quick_checkpoint: Path, tmp_path: Path):
    write_placement(tmp_path / "other.json", identity_placement(1, 16, ep_size=RANKS))
    with pytest.raises(SettingsError, match="expert_placement: the placements have different"):
        Engine(str(quick_checkpoint), **CORE, **MOVED, expert_placement=str(tmp_path / "other.json"))
