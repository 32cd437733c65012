"""Reasoning between markers of any length, and its budget: never longer, and nothing else is left out."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from rayserve_moe.constraints.matchers import Vocabulary
from rayserve_moe.constraints.token_guide import EMPTY
from rayserve_moe.engine.guides import ThinkingBudget
from rayserve_moe.requests.reasoning_span import ReasoningMarkers, ReasoningSpan, ThinkingLimit

NUM_IDS = 8
VOCABULARY = Vocabulary(tuple(bytes([ord("a") + i]) for i in range(NUM_IDS)), (), (0,))
written = VOCABULARY.token_bytes.__getitem__
MARKERS = st.sampled_from([((6,), (7,)), ((5, 6), (6, 7)), ((4, 5), (7, 7, 6)), ((6,), (7, 5))])


def reference(ids: list[int], markers: ReasoningMarkers) -> int:
    """Tokens of reasoning, by searching the text of ids for one marker after the other."""
    place, count, is_open = 0, 0, markers.is_begun
    while True:
        marker = markers.end_ids if is_open else markers.begin_ids
        ends = [i for i in range(place, len(ids)) if tuple(ids[i : i + len(marker)]) == marker]
        if not ends:
            return count + (len(ids) - place if is_open else 0)
        count += ends[0] - place if is_open else 0
        place, is_open = ends[0] + len(marker), not is_open


@given(
    ids=st.lists(st.integers(4, NUM_IDS - 1), max_size=30), ends=MARKERS, is_begun=st.booleans(), cut=st.integers(0, 30)
)
def test_tokens_between_markers_are_counted_in_whatever_pieces_they_come(ids, ends, is_begun, cut):
    markers = ReasoningMarkers(*ends, is_begun)
    span = ReasoningSpan(markers, written)
    span.follow(ids[:cut])
    span.follow(ids[cut:])
    assert span.num_tokens == reference(ids, markers)


@given(drawn=st.lists(st.integers(0, NUM_IDS - 1), min_size=40, max_size=40), ends=MARKERS, budget=st.integers(0, 6))
@example(drawn=[0, 0, 0, 0, 7, 7, *[0] * 34], ends=((4, 5), (7, 7, 6)), budget=5)
def test_reasoning_is_ended_by_its_marker_at_the_budget_and_nothing_else_is_forced(drawn, ends, budget):
    markers = ReasoningMarkers(*ends, is_begun=True)
    guide = ThinkingBudget(ThinkingLimit(budget, markers), VOCABULARY)
    outputs: list[int] = []
    for wanted in drawn:
        mask = guide.next_mask(np.asarray(outputs, np.int32))
        assert isinstance(mask, np.ndarray)
        left = [i for i in range(NUM_IDS) if int(mask[0]) >> i & 1]
        span = ReasoningSpan(markers, written)
        span.follow(outputs)
        is_over = span.begun_at is not None and len(outputs) - span.begun_at >= budget
        assert len(left) == (1 if is_over else NUM_IDS)
        outputs.append(wanted if wanted in left else left[0])
    span = ReasoningSpan(markers, written)
    lengths, before = [], 0
    for i, token_id in enumerate(outputs):
        span.follow([token_id])
        if span.num_ended != before:
            lengths.append(span.num_ended - before)
            before = span.num_ended
        assert span.begun_at is None or i + 1 - span.begun_at <= budget + len(markers.end_ids)
    assert all(length <= budget for length in lengths)


def test_an_end_that_is_not_allowed_ends_the_answer():
    limit = ThinkingLimit(1, ReasoningMarkers((6,), (7,), is_begun=True))
    guide = ThinkingBudget(limit, VOCABULARY, allowed_ids=[1, 2])
    assert isinstance(guide.next_mask(np.zeros(0, np.int32)), np.ndarray)
    assert guide.next_mask(np.array([1], np.int32)) == EMPTY


@given(data=st.data(), is_begun=st.booleans())
def test_any_tokens_may_spell_a_marker(data, is_begun):
    """However an answer is cut into tokens, reasoning begins and ends at the same places of its text."""
    text = b"<t>why</t>said<t>a</t> b"[3 if is_begun else 0 :]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))) | _ends_of_markers(text))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    table = [b"<t>", b"</t>", *pieces]
    span = ReasoningSpan(ReasoningMarkers((0,), (1,), is_begun), table.__getitem__)
    place, inside = 0, is_begun
    for token_id, piece in enumerate(pieces, start=2):
        span.follow([token_id])
        place += len(piece)
        if text[:place].endswith(b"</t>" if inside else b"<t>"):
            inside = not inside
        assert (span.begun_at is not None) == inside, (pieces, place)
    reasoning = [text[begin:end] for begin, end in _reasoning(text, is_begun)]
    if all(len(piece) == 1 for piece in pieces):
        assert span.num_tokens == sum(map(len, reasoning))
    assert span.num_tokens <= sum(map(len, reasoning))


def _ends_of_markers(text: bytes) -> set[int]:
    return {
        place + len(marker)
        for marker in (b"<t>", b"</t>")
        for place in range(len(text))
        if text.startswith(marker, place)
    }


def _reasoning(text: bytes, is_begun: bool) -> list[tuple[int, int]]:
    found, place = [], 0 if is_begun else text.index(b"<t>") + 3
    while (end := text.find(b"</t>", place)) >= 0:
        found.append((place, end))
        begin = text.find(b"<t>", end)
        if begin < 0:
            break
        place = begin + 3
    return found
