"""Streamed text is the decoded whole, cut only between characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.text.tokenizer import IncrementalDetokenizer

# Ids of valid text, of any bytes (broken UTF-8 mostly), of special and added tokens, and of no token at all.
TOKENS = st.one_of(st.integers(0, 300), st.integers(127 + 3, 258), st.integers(0, 2), st.integers(259, 276))


def _pieces(tokenizer, ids, *, skip_special_tokens=True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, hidden_ids=None if skip_special_tokens else frozenset())
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(ids=st.lists(TOKENS, max_size=60), skip=st.booleans())
def test_pieces_join_to_what_decode_gives(tokenizer, extended, ids, skip):
    for each in (tokenizer, extended):
        joined = "".join(_pieces(each, ids, skip_special_tokens=skip))
        assert joined == each.decode(ids, skip_special_tokens=skip)


@given(groups=st.lists(st.lists(TOKENS, max_size=12), max_size=8), skip=st.booleans())
def test_ids_that_come_together_give_the_text_of_each_after_the_other(extended, groups, skip):
    together = IncrementalDetokenizer(extended, hidden_ids=None if skip else frozenset())
    one_by_one = IncrementalDetokenizer(extended, hidden_ids=None if skip else frozenset())
    for group in groups:
        assert together.extend(group) == "".join(map(one_by_one.push, group))
    assert together.flush() == one_by_one.flush()


@given(raw=st.binary(max_size=60))
def test_bytes_join_to_their_lossy_text(tokenizer, raw):
    of_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, 259)}
    ids = [of_byte[bytes([byte])] for byte in raw]
    assert "".join(_pieces(tokenizer, ids)) == raw.decode("utf-8", "replace") == tokenizer.decode(ids)


@given(text=st.text(alphabet=st.characters(exclude_characters="\ufffd<", exclude_categories=("Cs",))))
def test_valid_text_never_shows_a_replacement_and_leaves_with_its_last_byte(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = _pieces(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces)
    ends = [sum(map(len, (char.encode() for char in text[: i + 1]))) - 1 for i in range(len(text))]
    assert [position for position, piece in enumerate(pieces) if piece] == ends


def test_an_unfinished_character_comes_out_at_the_end_only(tokenizer):
    euro = tokenizer.encode("€")
    assert _pieces(tokenizer, euro) == ["", "", "€", ""]
    assert _pieces(tokenizer, euro[:2]) == ["", "", "\ufffd"]
    assert _pieces(tokenizer, [*euro[:2], *tokenizer.encode("a")]) == ["", "", "\ufffda", ""]


def test_a_skipped_special_token_does_not_break_a_character(tokenizer):
    first, second = tokenizer.encode("é")
    assert "".join(_pieces(tokenizer, [first, 2, second])) == tokenizer.decode([first, 2, second]) == "é"
