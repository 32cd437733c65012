"""The kernel of gated delta and Mamba-2 layers compiles everywhere, updates pools in place, and keeps its schedule."""

from __future__ import annotations

import pytest

from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.hlo_report import kernels_of
from tests.compile.delta_schedules import BASELINE, HEADS, TOKENS, WIDTH, Heads, compile_step, shapes_of
from tests.compile.topologies import TOPOLOGY_OF_CHIP, text_of


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "chip", ["v6e", *(pytest.param(chip, marks=pytest.mark.slow) for chip in TOPOLOGY_OF_CHIP if chip != "v6e")]
)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_it_compiles_and_copies_no_pool(chip: str, heads: Heads):
    compiled = compile_step(chip, heads)
    assert kernels_of(text_of(compiled)) == {"delta_rule": 1}
    by_element = heads.num_decays > 1
    rows = 2 * heads.num_key_heads + 3 * heads.num_blocks + heads.num_heads * by_element
    memory, of_tokens = compiled.memory_analysis(), 4 * TOKENS * WIDTH * rows
    assert memory.alias_size_in_bytes >= sum(4 * pool.size for pool in shapes_of(heads)[0])
    assert memory.temp_size_in_bytes < 4 * of_tokens, "tokens in float32, and no pool"


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_no_call_takes_more_bundles_than_the_baseline(chip):
    """Where a change is meant to cost this, `python -m tests.compile.delta_schedules` writes the baseline anew."""
    assert not BASELINE.slower(chip)
