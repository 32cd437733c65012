"""Experts in 8 bits take no more bundles than the baseline has, and wait for memory where chips convert them."""

from __future__ import annotations

import pytest

from tests.compile.narrow_schedules import (
    BASELINE,
    KINDS,
    MULTIPLY_E4M3,
    NARROW_ROWS,
    ONE_CORE,
    kinds_of,
    memory_bundles,
)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ONE_CORE)
def test_no_slot_takes_more_bundles_than_the_baseline(chip):
    """Where a change is meant to cost this, `python -m tests.compile.narrow_schedules` writes the baseline anew."""
    assert not BASELINE.slower(chip)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bfloat16"])
def test_8_bits_wait_for_memory_on_v6e_in_blocks_too(kind):
    assert BASELINE.committed()["v6e"][kind] <= memory_bundles("v6e")


@pytest.mark.parametrize("chip", MULTIPLY_E4M3)
def test_rows_in_8_bits_too_take_less_code_than_the_bytes_of_an_expert(chip):
    """With scales by block, rows in bfloat16 keep the core busier than memory; rows in e4m3 do not."""
    known, narrow = BASELINE.committed()[chip], [kind for kind in kinds_of(chip) if kind.endswith(NARROW_ROWS)]
    assert set(known) == set(kinds_of(chip)) and len(narrow) == 2
    for kind in narrow:
        assert known[kind] <= 0.8 * known[kind.removesuffix(f", {NARROW_ROWS}")]
        assert known[kind] <= memory_bundles(chip)
