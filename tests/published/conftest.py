"""Fixtures of published tokenizers, fetched by `make published`."""

from __future__ import annotations

import pytest

from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.text.published_tokenizers import NAMES, opened


@pytest.fixture(params=NAMES)
def published(request: pytest.FixtureRequest) -> Tokenizer:
    """Yield each published tokenizer."""
    return opened(request.param)
