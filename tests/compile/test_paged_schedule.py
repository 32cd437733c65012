"""Our own paged attention takes no more bundles than its baseline, and for few rows no more than memory takes."""

from __future__ import annotations

import json

import pytest

from tests.compile.paged_schedules import MODELS, baseline, bundles_of, memory_bundles

TOLERANCE = 1.02
"""A change of the compiler's mood moves a schedule by less."""
NEAR = {"v5e": 1.0, "v5p": 1.0, "v6e": 1.0, "tpu7x": 1.0}
"""Most bundles of a block over those that its bytes take: single tokens wait for memory."""


@pytest.mark.slow
@pytest.mark.parametrize("chip", NEAR)
def test_no_block_of_keys_takes_more_bundles_than_the_baseline(chip):
    """Where a change is meant to cost this, `python -m tests.compile.paged_schedules` writes the baseline anew."""
    found, known = bundles_of(chip), baseline()[chip]
    slower = {name: (known[name], value) for name, value in found.items() if value > known[name] * TOLERANCE}
    assert not slower, json.dumps(slower)


@pytest.mark.parametrize(("chip", "most"), NEAR.items())
def test_single_tokens_of_grouped_heads_wait_for_memory(chip, most):
    for model, (_, num_kv, *_) in MODELS.items():
        if num_kv > 1:
            assert baseline()[chip][f"{model}, single tokens"] <= most * memory_bundles(chip, model)
