"""Offsets of echoed prompts over published tokenizers count in the text that was sent."""

from __future__ import annotations

import pytest

from rayserve_moe.text.tokenizer import Tokenizer
from tests.unit.serving.api.answers.test_echo import hold_offsets

pytestmark = pytest.mark.published


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_offsets_count_in_the_text_that_was_sent(published: Tokenizer, count: int) -> None:
    hold_offsets(published, count=count)
