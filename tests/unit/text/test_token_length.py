"""A text that is refused by its length alone has more tokens than it may; where that cannot be told none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.text.tokenizer import TextTooLongError, Tokenizer

PIECES = ["<|turn|>", "日本", "Ġx", "ab cd", " ", "\n", "é", "é", "\N{KELVIN SIGN}", "\N{ANGSTROM SIGN}", "각", "x"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5)).map("".join)


def changed(directory, path, **parts):
    """A tokenizer like the one there, with other parts or with other added tokens."""
    backing = AutoTokenizer.from_pretrained(directory)
    backing.add_tokens(parts.pop("tokens", []))
    for name, part in parts.items():
        setattr(backing.backend_tokenizer, name, part)
    backing.save_pretrained(path)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def shrinking(directory, tmp_path_factory):
    """Its normalizer leaves fewer bytes than it gets, and its pre-tokenizer begins with a blank."""
    step = pre_tokenizers.Split(Regex(r"\s+|\d"), "isolated")
    return changed(
        directory,
        tmp_path_factory.mktemp("shrinking"),
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip(), normalizers.Replace("ab", "")]),
        pre_tokenizer=pre_tokenizers.Sequence([step, pre_tokenizers.ByteLevel(add_prefix_space=True)]),
        tokens=["日本", "Ġx", "ab cd", AddedToken("<|turn|>", special=True)],
    )


@pytest.fixture(scope="module")
def calculator():
    """Its bytes 0 and 10 are added tokens, and not in the model's own vocabulary."""
    return Tokenizer(TRAINED["calculator"])


@given(text=TEXTS)
def test_what_fits_is_never_refused(tokenizer, extended, shrinking, calculator, text):
    for each in (tokenizer, extended, shrinking, calculator):
        ids = each.encode(text)
        assert not each.exceeds(len(ids), text)
        assert each.encode(text, max_tokens=len(ids)) == ids


def test_what_cannot_fit_is_refused_before_it_is_tokenized(tokenizer, extended, shrinking, calculator):
    for each in (tokenizer, extended, shrinking, calculator):
        with pytest.raises(TextTooLongError):
            each.encode("x" * 2**20, max_tokens=512)


def test_the_fast_way_gives_what_the_tokenizer_gives(extended):
    for text in ("", "plain ab cd <|turn|>日本", "\n\n  x", "é" * 9):
        assert extended.encode(text) == extended.backing.encode(text)
        assert extended.encode(text, add_special_tokens=False) == extended.backing.encode(
            text, add_special_tokens=False
        )


@pytest.mark.parametrize(
    "parts",
    [
        {"tokens": [AddedToken("<mask>", lstrip=True)]},
        {"tokens": [AddedToken("<|end|>", rstrip=True)]},
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        },
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
    ],
)
def test_nothing_is_refused_where_text_can_vanish(directory, tmp_path, parts):
    assert not changed(directory, tmp_path, **parts).exceeds(1, "x " * 100_000)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Replace("x", "\n")},
        {"tokens": [AddedToken("\nword", single_word=True)]},
    ],
)
def test_nothing_is_refused_where_an_added_token_may_miss_its_byte(tmp_path, parts):
    tokenizer = changed(TRAINED["calculator"], tmp_path, **parts)
    assert not tokenizer.exceeds(1, "\nwords" * 10_000)


def test_nothing_is_refused_where_special_tokens_are_not_looked_for(tmp_path):
    backing = AutoTokenizer.from_pretrained(TRAINED["calculator"], split_special_tokens=True)
    backing.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("1\n") == [ord("1")]
    assert not tokenizer.exceeds(1, "\n" * 10_000)
