"""Whichever hosts are left, and in whatever order, each has compiled the programs of its place."""

from __future__ import annotations

import pytest

from rayserve_moe.cluster.programs_ahead import arrangements


@pytest.mark.parametrize("nodes", ["ab", "abcd", "aabb", "aaaa", "abac"])
@pytest.mark.parametrize("num_lost", [1, 2])
def test_every_node_has_every_place_of_a_smaller_group(nodes: str, num_lost: int) -> None:
    num_hosts = len(nodes) - num_lost
    found = arrangements(list(nodes), num_hosts)
    places = {(node, place) for each in found for place, node in enumerate(each)}
    assert places == {(node, place) for node in nodes for place in range(num_hosts)}
    assert len(found) == len(set(found)) and all(len(each) == num_hosts for each in found)


def test_hosts_of_one_node_compile_once() -> None:
    assert arrangements(["a"] * 3, 2) == [("a", "a")]
