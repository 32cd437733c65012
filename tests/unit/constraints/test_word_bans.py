"""No output has a bad word, and nothing else is left out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.constraints.token_guide import EMPTY
from rayserve_moe.engine.guides import WordBans
from rayserve_moe.requests.finish_reason import FinishReason

NUM_IDS = 40
IDS = st.integers(0, 4)
WORDS = st.lists(st.lists(IDS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)


def left_by(mask) -> set[int]:
    bits = mask.view(np.uint32)
    return {i for i in range(NUM_IDS) if bits[i // 32] >> np.uint32(i % 32) & np.uint32(1)}


@given(outputs=st.lists(IDS, max_size=12), words=WORDS, allowed=st.sets(IDS, max_size=4))
def test_an_id_is_left_out_where_it_would_complete_a_word(outputs, words, allowed):
    mask = WordBans(words, num_ids=NUM_IDS, allowed_ids=allowed).next_mask(np.asarray(outputs, np.int32))
    wanted = {
        i for i in allowed or range(NUM_IDS) if not any(tuple([*outputs, i][-len(word) :]) == word for word in words)
    }
    if wanted:
        assert left_by(mask) == wanted
    else:
        assert mask == EMPTY


class OnlyIds:
    """A guide that leaves these ids, or ends."""

    def __init__(self, given):
        self.given, self.last_ms = given, 0.0

    def next_mask(self, output_ids):
        return self.given


def test_another_guide_limits_it_too():
    inner = OnlyIds(np.asarray([0b110, 0], np.int32))
    assert left_by(WordBans([(1,)], num_ids=NUM_IDS, inner=inner).next_mask(np.zeros(0, np.int32))) == {2}
    stop = FinishReason("stop")
    assert WordBans([(1,)], num_ids=NUM_IDS, inner=OnlyIds(stop)).next_mask(np.zeros(0, np.int32)) is stop
