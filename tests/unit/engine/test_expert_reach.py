"""How many experts rows reach: counted where they choose apart, and learned where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.engine.speculation.step_times import LOOK_EVERY, ExpertReach

EXPERTS, TOP_K, LAYERS = 32, 4, 24


def drawn(num_rows: int, num_experts: int = EXPERTS, seed: int = 0) -> np.ndarray:
    """Rows that choose among the first experts, [T, layers, k]."""
    shape = (num_rows, LAYERS, num_experts)
    return np.random.default_rng(seed).random(shape).argsort(axis=-1)[..., :TOP_K]


def reached(rows: np.ndarray) -> float:
    return float(np.mean([len(np.unique(rows[:, layer])) for layer in range(LAYERS)]))


@pytest.mark.parametrize("num_rows", [1, 2, 8, 64])
def test_rows_that_choose_apart_reach_as_many_as_were_counted(num_rows: int):
    reach = ExpertReach(EXPERTS, TOP_K)
    assert reach.distinct(num_rows) == pytest.approx(reached(drawn(num_rows)), rel=0.05)
    assert reach.work(1) == pytest.approx(1.0) and reach.work(num_rows + 1) > reach.work(num_rows)


def test_rows_that_resemble_each_other_reach_as_many_as_captured_routing_says():
    reach, alike = ExpertReach(EXPERTS, TOP_K), 8
    for seed in range(60 * LOOK_EVERY):
        reach.record(drawn(6, alike, seed) if seed % LOOK_EVERY == 0 else drawn(1))
    for num_rows in (2, 4, 16):
        assert reach.distinct(num_rows) == pytest.approx(reached(drawn(num_rows, alike)), rel=0.05)


def test_rows_of_one_choice_reach_no_more_than_it():
    reach, same = ExpertReach(EXPERTS, TOP_K), np.repeat(drawn(1), 8, axis=0)
    for _ in range(100 * LOOK_EVERY):
        reach.record(same)
    assert reach.distinct(64) == pytest.approx(TOP_K, rel=0.05)
