"""Text of tokenizers that fall back to bytes is what the tokenizers library makes of all ids at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from rayserve_moe.engine.guides import vocabulary_of
from rayserve_moe.text.token_forms import UnknownFormError, byte_of, form_of
from rayserve_moe.text.tokenizer import IncrementalDetokenizer, SegmentEncoder, TextTooLongError, Tokenizer

BYTES, LAST = range(3, 259), 310
IDS = st.lists(st.one_of(st.integers(0, LAST), st.sampled_from(BYTES), st.just(259)), max_size=40)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def streamed(tokenizer: Tokenizer, ids: list[int], *, skips: bool, continues: bool = False) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, hidden_ids=None if skips else frozenset(), continues=continues)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@given(ids=IDS, skips=st.booleans())
def test_pieces_join_to_what_decode_gives(fallback, ids, skips):
    assert streamed(fallback, ids, skips=skips) == fallback.decode(ids, skip_special_tokens=skips)


@given(text=TEXTS)
def test_a_text_is_encoded_and_streamed_back(fallback, text):
    ids = fallback.encode(text)
    assert ids == fallback.backing(text).input_ids
    assert SegmentEncoder(fallback).encode(text).tolist() == ids
    assert streamed(fallback, ids, skips=True) == text.replace("\u2581", " ")
    assert not fallback.exceeds(len(ids), text)


def test_a_text_that_is_far_too_long_is_refused_unread(fallback):
    with pytest.raises(TextTooLongError):
        fallback.encode("hello " * 1000, max_tokens=10)


@given(prompt=TEXTS, answer=TEXTS)
def test_an_answer_goes_on_with_its_prompt(fallback, prompt, answer):
    """Its first space stays: whole and cut in two, prompt and answer are one text."""
    ids = fallback.encode(f"x{prompt} {answer}")
    for cut in range(2, len(ids)):
        if ids[cut - 1] not in BYTES:
            first = streamed(fallback, ids[:cut], skips=True)
            rest = streamed(fallback, ids[cut:], skips=True, continues=True)
            assert first + rest == fallback.decode(ids)


def test_what_tokens_write_is_what_grammars_are_given(fallback):
    vocabulary = vocabulary_of(fallback, fallback.vocab_size, eos_ids=fallback.eos_token_ids)
    table = vocabulary.tokens()
    for token_id in range(3, fallback.vocab_size):
        inside = [fallback.encode("a")[-1], token_id]
        written = fallback.token_bytes(token_id)
        assert table.decode_bytes([token_id]) == written or written == b"\xff", (
            "no UTF-8 has it, and the engine marks by it"
        )
        assert fallback.decode(inside) == "a" + written.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("token", "byte"),
    [
        ("<0x0A>", 10),
        ("<0xff>", 255),
        ("<0x1>", None),
        ("<0xGG>", None),
        ("<0x é>", None),
        ("<0x0A", None),
        ("a", None),
    ],
)
def test_a_byte_is_one_only_in_its_own_form(token, byte):
    assert byte_of(token) == byte


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("_", "-"), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence(
            [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
        ),
    ],
    ids=str,
)
def test_another_form_is_refused(decoder):
    with pytest.raises(UnknownFormError, match="only ByteLevel"):
        form_of(decoder)
