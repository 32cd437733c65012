"""Samples count up to the first draft that is wrong, whatever stands around them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.decoding.sampling import accepted, drafts_of, tree_drafts_of
from rayserve_moe.scheduling.draft_trees import lay_out

MOST, MOST_CHAINS = 3, 6
NUM_SAMPLES = MOST_CHAINS * (MOST + 1) + 2


CHAINS = st.tuples(st.integers(0, MOST), st.lists(st.booleans(), min_size=MOST, max_size=MOST))


@given(st.lists(CHAINS, max_size=MOST_CHAINS))
def test_what_counts_is_a_prefix_of_every_chain(chains):
    rows, positions, ids, sampled, counts, is_last, drafted = [], [], [], [], [], [], []
    for row, (num_drafts, is_right) in enumerate(chains):
        num_right = next((i for i in range(num_drafts) if not is_right[i]), num_drafts)
        own = [10 * row + i for i in range(num_drafts + 2)]
        rows += [row] * (num_drafts + 1)
        positions += range(5, 6 + num_drafts)
        ids += [own[0], *(own[i + 1] if is_right[i] else 999 for i in range(num_drafts))]
        sampled += own[1:]
        counts += [i <= num_right for i in range(num_drafts + 1)]
        is_last += [i == num_right for i in range(num_drafts + 1)]
        chain = ids[-num_drafts:] if num_drafts else []
        drafted += [[*reversed(chain[:i]), *[-1] * (MOST - i)] for i in range(num_drafts + 1)]
    padding = NUM_SAMPLES - len(rows)
    zeros, places = [0] * padding, np.array([*positions, *[1] * padding], np.uint32)
    found = drafts_of(np.array([*rows, *[99] * padding]), places, np.array([*ids, *zeros]), max_drafts=MOST)
    found_counts, found_last = accepted(np.array([*sampled, *zeros]), found)
    assert np.asarray(found_counts).tolist() == [*counts, *[True] * padding]
    assert np.asarray(found_last).tolist() == [*is_last, *[True] * padding]
    assert np.asarray(found.drafted_SK).tolist() == [*drafted, *[[-1] * MOST] * padding]


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=9), max_size=4), st.data())
def test_what_counts_of_a_tree_is_the_path_that_was_sampled(trees, data):
    """Walked from the root of each tree, which samples of it say where to go on."""
    levels, masks, ids, sampled, counts, is_last, drafted = 9, [], [], [], [], [], []
    for tree in trees:
        pairs = [(token, follows % (i + 1)) for i, (token, follows) in enumerate(tree)]
        laid_out = lay_out(np.array(pairs, np.int32).reshape(-1, 2), count=9, levels=levels)
        size, nodes = len(laid_out.token_ids), laid_out.ancestors.view(np.uint32)
        paths = [[j for j in range(32) if mask >> np.uint32(j) & 1] for mask in nodes]
        drawn = [data.draw(st.integers(0, 2)) for _ in range(size)]
        right = [0]
        while after := [
            p[-1] for p in paths if p[:-1] == paths[right[-1]] and laid_out.token_ids[p[-1]] == drawn[right[-1]]
        ]:
            right.append(after[0])
        masks += laid_out.ancestors.tolist()
        ids += laid_out.token_ids.tolist()
        sampled += drawn
        counts += [node in right for node in range(size)]
        is_last += [node == right[-1] for node in range(size)]
        before = [[int(laid_out.token_ids[node]) for node in reversed(path[1:])] for path in paths]
        drafted += [one + [-1] * (levels - len(one)) for one in before]
    padding = 50 - len(ids)
    zeros = [0] * padding
    found = tree_drafts_of(np.array([*masks, *[1] * padding], np.int32), np.array([*ids, *zeros]), max_drafts=levels)
    found_counts, found_last = accepted(np.array([*sampled, *zeros]), found)
    assert np.asarray(found_counts).tolist() == [*counts, *[True] * padding]
    assert np.asarray(found_last).tolist() == [*is_last, *[True] * padding]
    assert np.asarray(found.drafted_SK)[: len(ids)].tolist() == drafted
