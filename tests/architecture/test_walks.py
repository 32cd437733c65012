"""The six walks of docs/architecture.md are those that a running engine goes."""

from __future__ import annotations

import jax
import pytest

from tests.architecture import walks

STATED = walks.stated_walks(walks.PAGE.read_text(encoding="utf-8"))
NAMES = ("prompt tokens", "a routing row", "an expert's weights", "a plan for experts", "a lost host", "a setting")


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    assert len(jax.devices()) >= 8, "the engine would start jax with four, and later tests of this process need eight"
    return walks.traced_walks(tmp_path_factory.mktemp("walks"))


def test_the_page_states_six_walks_of_six_hops():
    assert tuple(STATED) == NAMES
    assert {len(hops) for hops in STATED.values()} == {6}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_walk_takes_the_hops_that_the_page_states_in_their_order(traced, name):
    assert walks.missing_or_late(STATED[name], traced[name]) == []


def test_a_missing_hop_and_a_hop_out_of_order_are_found():
    seen = ["serving/api/routes.complete", "engine/loop.Loop.submit", "execution/step/pack.pack"]
    assert walks.missing_or_late(["serving/api/routes", "engine/loop.Loop.submit", "execution/step/pack"], seen) == []
    assert walks.missing_or_late(["serving/api/routes", "scheduling/scheduler", "execution/step/pack"], seen) == [
        "scheduling/scheduler"
    ]
    assert walks.missing_or_late(["execution/step/pack", "serving/api/routes"], seen) == ["serving/api/routes"]
