"""What is remembered between special tokens never changes what a text is encoded to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.text import tokenizer as tokenizer_module
from rayserve_moe.text.chat import encode_chat, render_chat
from rayserve_moe.text.tokenizer import SegmentEncoder

PIECES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@given(pieces=st.lists(PIECES, min_size=1, max_size=5), which=st.integers(0, 100), adds_special=st.booleans())
def test_a_text_is_encoded_as_the_tokenizer_does(tokenizer, extended, pieces, which, adds_special):
    tokenizer = extended if which % 2 else tokenizer
    names = [str(token) for token in tokenizer.backing.added_tokens_decoder.values()]
    assert names
    text = "".join(piece + names[(which + place) % len(names)] for place, piece in enumerate(pieces)) + pieces[0]
    encoder = SegmentEncoder(tokenizer)
    for _ in range(2):
        ids = encoder.encode(text, add_special_tokens=adds_special)
        assert ids.dtype == np.int32
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=adds_special)


def test_a_chat_that_goes_on_costs_its_last_turn(tokenizer, monkeypatch):
    messages = [{"role": "user", "content": "what is six times seven"}]
    encoder, encoded = SegmentEncoder(tokenizer), []
    original = type(tokenizer).encode
    encoder.encode(render_chat(tokenizer, messages), add_special_tokens=False)
    messages += [{"role": "assistant", "content": "forty-two"}, {"role": "user", "content": "and eight"}]
    text = render_chat(tokenizer, messages)

    def noted(self, text, **options):
        encoded.append(text)
        return original(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", noted)
    ids = encoder.encode(text, add_special_tokens=False)
    assert not any("six times" in text for text in encoded)
    monkeypatch.undo()
    assert ids.tolist() == encode_chat(tokenizer, messages)


def test_memory_is_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_CHARACTERS", 500)
    encoder = SegmentEncoder(tokenizer)
    for number in range(50):
        encoder.encode(f"text number {number}", add_special_tokens=False)
        assert encoder._size <= 500 and len(encoder._known) <= 8


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_take_more_than_themselves_are_left_to_the_tokenizer(tokenizer, monkeypatch, flag):
    token = next(iter(tokenizer.backing.added_tokens_decoder.values()))
    taking = type(token)(str(token), **{flag: True})
    monkeypatch.setattr(type(tokenizer.backing), "added_tokens_decoder", {0: taking})
    assert SegmentEncoder(tokenizer)._borders is None
