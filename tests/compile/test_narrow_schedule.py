"""Experts in 8 bits take no more bundles than the baseline has, and wait for memory where chips convert them."""

from __future__ import annotations

import json

import pytest

from tests.compile.narrow_schedules import KINDS, ONE_CORE, baseline, bundles_of, memory_bundles

TOLERANCE = 1.02
"""A change of the compiler's mood moves a schedule by less."""


@pytest.mark.slow
@pytest.mark.parametrize("chip", ONE_CORE)
def test_no_slot_takes_more_bundles_than_the_baseline(chip):
    """Where a change is meant to cost this, `python -m tests.compile.narrow_schedules` writes the baseline anew."""
    found, known = bundles_of(chip), baseline()[chip]
    slower = {name: (known[name], value) for name, value in found.items() if value > known[name] * TOLERANCE}
    assert not slower, json.dumps(slower)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bfloat16"])
def test_8_bits_wait_for_memory_on_v6e_in_blocks_too(kind):
    assert baseline()["v6e"][kind] <= memory_bundles("v6e")
