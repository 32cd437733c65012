"""What followed the same words elsewhere is drafted, by the longest end that is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.engine.speculation.proposers import continuation

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30).map(lambda ids: np.array(ids, np.int32))


def drafts_by_definition(
    known: list[int], text: list[int], *, count: int, min_length: int, max_length: int
) -> list[int]:
    """Try ends from the longest on, and of the places of the first that is found take the last one."""
    for length in range(min(max_length, len(known)), min_length - 1, -1):
        end = known[-length:]
        places = [i for i in range(length, len(text)) if text[i - length : i] == end]
        if places:
            enough = [i for i in places if i + count <= len(text)]
            first = (enough or places)[-1]
            return text[first : first + count]
    return []


@given(TEXTS, TEXTS, st.integers(1, 7), st.integers(1, 3), st.integers(0, 3))
def test_drafts_are_those_of_the_definition(known, text, count, shortest, more):
    how = {"count": count, "min_length": shortest, "max_length": shortest + more}
    assert continuation(known, text, **how).tolist() == drafts_by_definition(known.tolist(), text.tolist(), **how)


@given(TEXTS, st.integers(1, 7))
def test_a_sequence_goes_on_as_it_did(known, count):
    drafts = continuation(known, known, count=count, min_length=1, max_length=4).tolist()
    assert len(drafts) == (count if known[-1] in known[:-1] else 0)


@pytest.mark.parametrize(
    ("known", "expected"),
    [([7, 7], [7, 7, 7, 7]), ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]), ([1, 2, 9, 3, 1, 2], [9, 3, 1, 2]), ([1, 2], [])],
)
def test_loops_go_on(known, expected):
    ids = np.array(known, np.int32)
    assert continuation(ids, ids, count=4, min_length=1, max_length=8).tolist() == expected
