"""Bad words become token ids, as they stand and after a space."""

from __future__ import annotations

import pytest

from rayserve_moe.requests import RequestError
from rayserve_moe.text.bad_words import bad_word_ids


def test_words_are_ids_as_they_stand_and_after_a_space(tokenizer):
    ids = bad_word_ids(tokenizer, ["ab", " ab"])
    assert tuple(tokenizer.encode("ab", add_special_tokens=False)) in ids and len(set(ids)) == len(ids)
    with pytest.raises(RequestError, match="empty"):
        bad_word_ids(tokenizer, ["   "])
