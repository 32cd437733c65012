"""Fixtures of published tokenizers, fetched by `make published`."""

from __future__ import annotations

from functools import cache

import pytest

from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.published import NAMES, folder_of, is_there


@cache
def _opened(name: str) -> Tokenizer:
    return Tokenizer(folder_of(name))


@pytest.fixture(params=NAMES)
def published(request: pytest.FixtureRequest) -> Tokenizer:
    """Yield each published tokenizer."""
    if not is_there(request.param):
        pytest.skip("`make published` fetches it")
    return _opened(request.param)
