"""How many examples a property is tried on: all that it asks for in `make test-all`, fewer in `make test`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

ALL, SAMPLED = 100, 10
"""Examples of a property that asks for no number."""


def examples(count: int, **others: Any) -> settings:
    """Settings for `count` examples, or for as large a part of them as this run takes."""
    return settings(max_examples=max(1, count * settings.default.max_examples // ALL), **others)
