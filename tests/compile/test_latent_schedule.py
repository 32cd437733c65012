"""Products of latents per head wait for their matrices and rows, and take no more bundles than the baseline."""

from __future__ import annotations

import pytest

from rayserve_moe.tools.estimate.chips import CHIPS
from tests.compile.latent_schedules import BASELINE, MODELS, TOKENS, memory_bundles


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_no_product_takes_more_bundles_than_the_baseline(chip):
    """Where a change is meant to cost this, `python -m tests.compile.latent_schedules` writes the baseline anew."""
    assert not BASELINE.slower(chip)


@pytest.mark.parametrize("chip", CHIPS)
def test_products_wait_for_memory(chip):
    """With 16 tokens. With 128, eight heads on one of two cores may take 1.3 times as long, and so may tpu7x."""
    found = BASELINE.committed()[chip]
    for model in MODELS:
        for num_tokens in TOKENS:
            for kernel, bundles in memory_bundles(chip, model, num_tokens).items():
                bound = bundles if num_tokens <= 16 else 1.3 * bundles
                assert found[f"{kernel}, {model}, {num_tokens} tokens"] <= bound
