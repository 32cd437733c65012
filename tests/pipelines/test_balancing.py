"""An engine balances its experts by itself, and its answers are those of one whose experts stay."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.planning import imbalance, rank_loads
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.engine.eplb.control import BalancingView
from tests.support.engine.workload import draw_prompt
from tests.support.experts.eplb_proposals import EPLB_SETTINGS, SKEWED_CONFIG, SPREAD_SETTINGS

WITHIN_S = 600.0
ASKED = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("skewed") / "model", SKEWED_CONFIG, seed=3, dtype="float32")


def is_balanced(view: BalancingView, start: ExpertPlacement) -> bool:
    """Whether experts have moved, and ranks carry about the same now, as they would not have where experts were."""
    at_start = imbalance(rank_loads(start, np.asarray(view.tokens)))
    is_moved = any(record.outcome == "finished" for record in view.history)
    return is_moved and bool(np.mean(view.imbalance_now) < 1.1 < 1.2 < at_start.mean())


@pytest.mark.slow
def test_a_skewed_load_becomes_a_balanced_one_unasked_and_answers_stay_the_same(skewed):
    others = set(threading.enumerate())

    def balances() -> bool:
        """Whether an engine that was started since has a thread for it."""
        return "eplb-control" in {thread.name for thread in set(threading.enumerate()) - others}

    prompts = [draw_prompt(np.random.default_rng(seed), 20).tolist() for seed in range(8)]
    with Engine(str(skewed), **SPREAD_SETTINGS) as engine:
        assert not engine.loop.eplb.moves_experts
        assert not balances()
        expected = [answer["output_ids"] for answer in engine.generate(input_ids=prompts, **ASKED)]

    with Engine(str(skewed), **SPREAD_SETTINGS, **EPLB_SETTINGS) as engine:
        assert engine.loop.eplb.moves_experts and balances()
        start = engine.loop.eplb.migration.placement
        deadline = time.monotonic() + WITHIN_S
        while not is_balanced(engine.loop.eplb_control.view(), start):
            assert time.monotonic() < deadline
            answers = engine.generate(input_ids=prompts, **ASKED)
            assert [answer["output_ids"] for answer in answers] == expected
        view = engine.loop.eplb_control.view()
        assert engine.runner.num_compilations_since_start == 0, "other engines of this process aside"
    assert view.history[0].moved_slots > 0 and view.actor.alive and view.actor.refused == {}
