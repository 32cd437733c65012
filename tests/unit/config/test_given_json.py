"""JSON of checkpoints: strict, but for an infinite bound in a published `config.json`."""

from __future__ import annotations

import math

import pytest

from rayserve_moe.config.given_files import GivenFileError, parse_json_object


def test_infinity_is_read_where_it_is_allowed():
    assert parse_json_object(b'{"limit": [0.0, Infinity]}', allows_infinity=True) == {"limit": [0.0, math.inf]}
    with pytest.raises(GivenFileError, match="Infinity is no JSON number"):
        parse_json_object(b'{"limit": [0.0, Infinity]}')


@pytest.mark.parametrize("number", ["-Infinity", "NaN", "1e400"])
def test_other_numbers_that_are_not_finite_are_refused(number: str):
    with pytest.raises(GivenFileError, match="not readable as JSON"):
        parse_json_object(f'{{"limit": {number}}}'.encode(), allows_infinity=True)
