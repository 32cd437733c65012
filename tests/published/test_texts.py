"""Encoding and streamed decoding by published tokenizers equal those of transformers."""

from __future__ import annotations

import pytest

from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.text.tokenizer_laws import hold_cuts, hold_ids, hold_lengths, hold_texts

pytestmark = pytest.mark.published
FEW_OR_MANY = pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
CUT_EVERYWHERE = pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])


@FEW_OR_MANY
def test_texts_are_encoded_and_streamed_as_transformers_has_them(published: Tokenizer, count: int) -> None:
    hold_texts(published, count=count)


@CUT_EVERYWHERE
def test_texts_are_streamed_at_every_cut(published: Tokenizer, count: int) -> None:
    hold_cuts(published, count=count)


@FEW_OR_MANY
def test_any_ids_have_the_text_of_transformers(published: Tokenizer, count: int) -> None:
    hold_ids(published, count=count)


def test_a_text_within_the_limit_is_not_rejected(published: Tokenizer) -> None:
    hold_lengths(published, count=500)
