"""Comparison of log-probs in JSON answers whose tokens were computed in different batches."""

from __future__ import annotations

from typing import Any

import pytest

LOGPROB_BOUND = 5e-6
"""By XLA in float32, which sums a row in another order in a program of another number of rows. docs/speculation.md
states 1e-6 and, as the largest exception, 4.5e-6. Native kernels change no bit: compare those with `==`."""


def assert_same_logprobs(actual: Any, expected: Any) -> None:
    """Assert that nested lists of [log-prob, token id, text] agree: log-probs to LOGPROB_BOUND, all else exactly."""
    if isinstance(expected, list):
        assert isinstance(actual, list) and len(actual) == len(expected), f"{actual} against {expected}"
        for one, other in zip(actual, expected, strict=True):
            assert_same_logprobs(one, other)
    elif isinstance(expected, float):
        assert isinstance(actual, float) and actual == pytest.approx(expected, rel=0, abs=LOGPROB_BOUND)
    else:
        assert actual == expected
