"""Projected heads of few tokens wait for their weights, and take no more bundles than the baseline."""

from __future__ import annotations

import pytest

from rayserve_moe.tools.estimate.chips import CHIPS
from tests.compile.head_schedules import BASELINE, MODELS, TOKENS, memory_bundles


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_no_projection_takes_more_bundles_than_the_baseline(chip):
    """Where a change is meant to cost this, `python -m tests.compile.head_schedules` writes the baseline anew."""
    assert not BASELINE.slower(chip)


@pytest.mark.parametrize("chip", CHIPS)
def test_projections_of_few_tokens_wait_for_memory(chip):
    """Of up to 128 tokens, on tpu7x of up to 32: its memory is faster, and of 128 it computes 1.3 times as long."""
    for model in MODELS:
        for num_tokens in [tokens for tokens in TOKENS if chip != "tpu7x" or tokens <= 32]:
            assert BASELINE.committed()[chip][f"{model}, {num_tokens} tokens"] <= memory_bundles(chip, model)
