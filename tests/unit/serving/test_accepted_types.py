"""Media types of `Accept`: weights, order, refusals, and headers that are malformed."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from rayserve_moe.serving.accepted_types import accepted_types


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([], []),
        (["a/b"], ["a/b"]),
        (["A/B ; Q=0.5, c/d"], ["c/d", "a/b"]),
        (["a/b, c/d"], ["a/b", "c/d"]),
        (["a/b", "c/d;q=0"], ["a/b"]),
        (["a/b;q=0, a/b;q=0.000"], []),
        (["a/b;level=1;q=0"], []),
        (["a/b;q=much, ,;q=1"], ["a/b"]),
        (["a/b;q=nan, c/d;q=-1"], []),
    ],
)
def test_types_come_by_their_weights(values: list[str], wanted: list[str]) -> None:
    headers = [(b"accept", value.encode()) for value in values]
    assert accepted_types(Request({"type": "http", "headers": headers})) == wanted
