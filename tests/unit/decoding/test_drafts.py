"""Samples count up to the first draft that is wrong, whatever stands around them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.decoding.sampling import accepted, drafts_of

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
