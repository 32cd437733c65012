"""Trees of drafts are laid out as nodes that see the path to them, and no draft is there twice."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from rayserve_moe.kernels import ancestors as on_device
from rayserve_moe.scheduling.draft_trees import (
    depths_of,
    joined,
    lay_out,
    levels_of,
    parents_of,
    right_drafts,
)
from tests.support.session.hypothesis_examples import examples

MOST = 31


@st.composite
def trees(draw: st.DrawFn) -> np.ndarray:
    """Drafts that each follow an earlier one, of few words, so that some are the same."""
    pairs = [(draw(st.integers(0, 2)), draw(st.integers(0, i))) for i in range(draw(st.integers(0, MOST)))]
    return np.array(pairs, np.int32).reshape(-1, 2)


def paths_by_definition(drafts: np.ndarray, *, count: int, levels: int) -> set[tuple[int, ...]]:
    """The tokens on the way to each of the first `count` drafts that is not too deep."""
    paths: list[tuple[int, ...]] = [()]
    for token, follows in drafts[:count].tolist():
        paths.append((*paths[follows], token))
    return {path for path in paths if 0 < len(path) <= levels}


@given(trees(), st.integers(0, MOST), st.integers(0, 5))
def test_each_node_sees_the_path_to_it(drafts, count, levels):
    found = lay_out(drafts, count=count, levels=levels)
    masks = found.ancestors.view(np.uint32)
    nodes = [[j for j in range(32) if mask >> np.uint32(j) & 1] for mask in masks]
    assert nodes[0] == [0] and all(path[-1] == node for node, path in enumerate(nodes))
    for node, path in enumerate(nodes):
        assert found.depths[node] == len(path) - 1
        assert node == 0 or nodes[path[-2]] == path[:-1]
    paths = [tuple(found.token_ids[path[1:]].tolist()) for path in nodes[1:]]
    assert len(paths) == len(set(paths))
    assert set(paths) == paths_by_definition(drafts, count=count, levels=levels)


@examples(30)
@given(trees())
@example(np.array([(5, i) for i in range(MOST)], np.int32))
@example(np.array([(5, 0)] + [(i, 1) for i in range(MOST - 1)], np.int32))
def test_hosts_and_devices_read_masks_alike(drafts):
    found = lay_out(drafts, count=MOST, levels=MOST)
    masks, positions = found.ancestors, 100 + found.depths.astype(np.int32)
    nodes = np.arange(len(masks))
    np.testing.assert_array_equal(depths_of(masks), found.depths)
    np.testing.assert_array_equal(on_device.depths_of(masks), found.depths)
    np.testing.assert_array_equal(on_device.nodes_of(masks), nodes)
    np.testing.assert_array_equal(on_device.places_of(positions, masks), 100 + nodes)
    parents = np.asarray(on_device.parents_of(masks))
    assert parents[0] == -1 and parents_of(masks)[0] == 0
    np.testing.assert_array_equal(nodes[1:] - parents_of(masks)[1:], parents[1:])
    for mask, path in zip(masks.view(np.uint32), np.asarray(on_device.paths_of(masks)), strict=True):
        bits = [j for j in range(32) if mask >> np.uint32(j) & 1]
        assert path[: len(bits)].tolist() == bits


def test_the_best_drafts_lie_like_a_chain():
    drafts = np.array([(5, 0), (6, 0), (7, 1), (8, 2), (9, 3)], np.int32)
    found = lay_out(drafts, count=5, levels=7)
    assert found.token_ids.tolist() == [0, 5, 7, 9, 6, 8]
    assert found.depths.tolist() == [0, 1, 2, 3, 1, 2]
    assert levels_of(drafts) == 3
    followed = np.array([6, 8, 1], np.int32)
    assert right_drafts(drafts, followed) == 2 and right_drafts(drafts, followed[1:]) == 0


@given(st.lists(st.integers(0, 3), max_size=7), st.integers(0, 7), st.integers(0, 7))
def test_a_chain_is_a_tree_without_branches(tokens, count, levels):
    chain = np.array(tokens, np.int32)
    as_tree = np.array([(token, i) for i, token in enumerate(tokens)], np.int32).reshape(-1, 2)
    found, expected = lay_out(chain, count=count, levels=levels), lay_out(as_tree, count=count, levels=levels)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert levels_of(chain) == len(tokens) == right_drafts(chain, chain)


def test_chains_are_joined_at_their_common_beginnings():
    chains = [np.array(chain, np.int32) for chain in ([1, 2, 3], [1, 2, 4], [5])]
    assert joined(chains, count=9).tolist() == [[1, 0], [2, 1], [3, 2], [4, 2], [5, 0]]
    assert joined(chains, count=4).tolist() == [[1, 0], [2, 1], [3, 2], [4, 2]]
    assert joined([], count=4).shape == (0, 2)
