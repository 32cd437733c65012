"""Our own paged attention takes no more bundles than its baseline, and for few rows no more than memory takes."""

from __future__ import annotations

import pytest

from tests.compile.paged_schedules import BASELINE, IN_8_BITS, MODELS, memory_bundles

NEAR = {"v5e": 1.0, "v5p": 1.0, "v6e": 1.0, "tpu7x": 1.0}
"""Most bundles of a block over those that its bytes take: single tokens wait for memory."""

WRITE_BUNDLES = 160


@pytest.mark.slow
@pytest.mark.parametrize("chip", NEAR)
def test_no_block_of_keys_takes_more_bundles_than_the_baseline(chip):
    """Where a change is meant to cost this, `python -m tests.compile.paged_schedules` writes the baseline anew."""
    assert not BASELINE.slower(chip)


@pytest.mark.parametrize(("chip", "most"), NEAR.items())
def test_single_tokens_of_grouped_heads_wait_for_memory(chip, most):
    """Numbers of 8 bits are decoded in more time than their bytes take."""
    for model, (_, num_kv, *_) in MODELS.items():
        if num_kv > 1 and model not in IN_8_BITS:
            assert BASELINE.committed()[chip][f"{model}, single tokens"] <= most * memory_bundles(chip, model)


@pytest.mark.parametrize("chip", NEAR)
def test_a_row_is_written_in_few_bundles(chip):
    """Once a sequence: it stands in the loop over blocks, but only the last one of a sequence takes it."""
    of_chip = BASELINE.committed()[chip]
    for model in MODELS:
        assert of_chip[f"{model}, single tokens, written"] - of_chip[f"{model}, single tokens"] <= WRITE_BUNDLES
