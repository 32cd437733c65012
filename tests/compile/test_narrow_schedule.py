"""Experts in 8 bits take no more bundles than the baseline has, and wait for memory where chips convert them."""

from __future__ import annotations

import pytest

from tests.compile.narrow_schedules import BASELINE, KINDS, ONE_CORE, memory_bundles


@pytest.mark.slow
@pytest.mark.parametrize("chip", ONE_CORE)
def test_no_slot_takes_more_bundles_than_the_baseline(chip):
    """Where a change is meant to cost this, `python -m tests.compile.narrow_schedules` writes the baseline anew."""
    assert not BASELINE.slower(chip)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bfloat16"])
def test_8_bits_wait_for_memory_on_v6e_in_blocks_too(kind):
    assert BASELINE.committed()["v6e"][kind] <= memory_bundles("v6e")
