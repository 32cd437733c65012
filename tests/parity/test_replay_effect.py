"""Replaying the rows that our bfloat16 engine returns brings a float32 trainer close; wrong rows drive it far away."""

from __future__ import annotations

from typing import Any

import pytest

effect = pytest.importorskip("examples.replay_effect", reason="the trainer needs torch: `make parity`")

rollouts = pytest.importorskip("examples.rollouts")

pytestmark = pytest.mark.parity

SHARPNESS = 4.0
SIZE = effect.Size(num_prompts=6, prompt_len=32, num_new_tokens=64)


@pytest.fixture(scope="module")
def point(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return effect.measure(tmp_path_factory.mktemp("effect"), sharpness=SHARPNESS, seed=0, size=SIZE)


@pytest.mark.parametrize("measure", ["kl", "k3"])
def test_replay_is_at_least_three_times_as_close_as_choosing_freely(point: dict[str, Any], measure: str) -> None:
    distances = point["distances"]
    assert 0 < distances["replayed"][measure] <= distances["free"][measure] / 3


@pytest.mark.parametrize("wrong", ["shifted", "shuffled"])
@pytest.mark.parametrize("measure", ["kl", "k3"])
def test_rows_of_other_positions_are_at_least_ten_times_as_far(point: dict[str, Any], wrong: str, measure: str) -> None:
    distances = point["distances"]
    assert distances[wrong][measure] >= 10 * distances["replayed"][measure]


def test_in_float32_no_row_differs(point: dict[str, Any]) -> None:
    float32 = point["float32"]
    fed = SIZE.prompt_len + SIZE.num_new_tokens - 1
    assert float32["rows"] == SIZE.num_prompts * fed * rollouts.MODEL.num_hidden_layers
    assert float32["differing"] == 0
    assert float32["differing_ties"] < 1e-3 * float32["rows"]


def test_the_exact_distance_is_that_of_what_was_served(point: dict[str, Any]) -> None:
    """Both forms of the served distribution are closer to each other than to any trainer, and tell the same story."""
    distances = point["distances"]
    assert distances["whole_run"]["k3"] <= distances["replayed"]["k3"]
    for name in effect.VARIANTS:
        assert distances[name]["k3"] == pytest.approx(distances[name]["kl"], rel=0.5)
