"""A placement comes back from its file as it went in; anything else is refused with what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rayserve_moe.balancing.placement import PlacementError, identity_placement
from rayserve_moe.balancing.placement_file import placement_as_json, placement_in, read_placement, write_placement
from tests.support.experts.placements import random_placement

START = identity_placement(3, 16, ep_size=4, num_redundant=4)


@pytest.mark.parametrize("seed", range(4))
def test_a_placement_comes_back_as_it_went_in(tmp_path, seed):
    placement = random_placement(START, seed)
    write_placement(tmp_path / "placement.json", placement, weight_version="7")
    again = read_placement(tmp_path / "placement.json")
    np.testing.assert_array_equal(again.expert_of_slot, placement.expert_of_slot)
    np.testing.assert_allclose(again.share_of_slot, placement.share_of_slot, atol=1e-6)
    np.testing.assert_array_equal(again.slot_for, placement.slot_for)
    assert json.loads((tmp_path / "placement.json").read_text())["weight_version"] == "7"


def test_without_shares_slots_take_equal_parts():
    content = placement_as_json(random_placement(START, 1))
    del content["share_of_slot"]
    placement = placement_in(content)
    experts = placement.expert_of_slot[0]
    assert np.allclose(placement.share_of_slot[0], 1 / np.bincount(experts)[experts])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": "16"}, "whole numbers"),
        ({"ep_size": 0}, "positive"),
        ({"ep_size": 3}, "spread evenly"),
        ({"expert_of_slot": None}, "missing"),
        ({"expert_of_slot": [[1, 2], [3]]}, "not a table"),
        ({"expert_of_slot": [["a"]]}, "not a table"),
        ({"expert_of_slot": (START.expert_of_slot.astype(np.int64) + (1 << 32)).tolist()}, "outside"),
        ({"expert_of_slot": [[10**30]]}, "not a table"),
        ({"share_of_slot": [[1.0]]}, "shape"),
        ({"share_of_slot": np.full(START.share_of_slot.shape, 1e300).tolist()}, "not a number"),
        ({"num_experts": 17}, "no slot"),
        ({"num_experts": 15}, "outside"),
    ],
)
def test_other_contents_are_refused_with_what_is_wrong(change, message):
    content = placement_as_json(START) | change
    with pytest.raises(PlacementError, match=message):
        placement_in(content)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_other_files_are_refused_by_name(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(PlacementError, match=r"other\.json"):
        read_placement(tmp_path / "other.json")
    with pytest.raises(PlacementError, match=r"absent\.json"):
        read_placement(tmp_path / "absent.json")
