"""What an index finds is what a search through all texts does, however they have grown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.engine.speculation.proposers import FIRST_PLACES, TokenIndex, continuation

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30).map(lambda ids: np.array(ids, np.int32))
GROWTH = st.lists(st.integers(1, 12), max_size=12)


def grown(index: TokenIndex, name: str, text: np.ndarray, steps: list[int]) -> None:
    """Add a text piece by piece."""
    for stop in np.cumsum(steps):
        index.extend(name, text[:stop])
    index.extend(name, text)


@given(TEXTS, GROWTH, st.integers(1, 7), st.integers(1, 3), st.integers(0, 3))
def test_a_text_alone_continues_as_by_a_search(text, steps, count, shortest, more):
    index = TokenIndex(min_length=shortest, max_length=shortest + more)
    grown(index, "own", text, steps)
    how = {"count": count, "min_length": shortest, "max_length": shortest + more}
    assert index.continuation("own", count).tolist() == continuation(text, text, **how).tolist()


@given(TEXTS, TEXTS, GROWTH, st.integers(1, 7), st.integers(1, 3), st.integers(0, 3))
def test_another_text_is_found_by_its_longest_match(own, other, steps, count, shortest, more):
    index = TokenIndex(min_length=shortest, max_length=shortest + more)
    grown(index, "other", other, steps)
    grown(index, "own", own, [1])
    found = index.continuation("own", count).tolist()
    how = {"count": count, "max_length": shortest + more}
    for length in range(shortest + more, shortest - 1, -1):
        in_other = continuation(own, other, min_length=length, **how).tolist()
        in_own = continuation(own, own, min_length=length, **how).tolist()
        if in_other or in_own:
            # Of two that match alike the later one that as many tokens follow.
            assert found in (in_other, in_own)
            assert len(found) == max(len(in_other), len(in_own))
            return
    assert not found


def test_the_longest_match_of_several_texts_counts_and_of_equals_the_last():
    index = TokenIndex(min_length=1, max_length=8)
    for place, text in enumerate(([2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [9, 3, 7])):
        index.extend(place, np.array(text, np.int32), is_whole=True)
    index.extend("own", np.array([1, 2, 3], np.int32))
    assert index.continuation("own", 3).tolist() == [6]
    assert len(index) == 5


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_a_text_that_outgrows_its_place_is_found_across_it(piece: int):
    text = np.arange(5 * FIRST_PLACES, dtype=np.int32)
    index = TokenIndex(min_length=2, max_length=4)
    for stop in range(piece, len(text) + piece, piece):
        index.extend("long", text[:stop])
    for end in range(2, len(text) - 4):
        index.extend(end, text[max(0, end - 3) : end], is_whole=True)
        assert index.continuation(end, 3).tolist() in (text[end : end + 3].tolist(), [end], [end, end + 1])
        assert index.continuation(end, 1).tolist() == [end]
