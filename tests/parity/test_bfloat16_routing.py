"""Experts that bfloat16 chooses by native kernels are as near to float32's as those of transformers; needs torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernels.native_kernels import need_native_kernels

routing = pytest.importorskip("benchmarks.bfloat16_routing", reason="the live comparison needs torch: `make parity`")

pytestmark = pytest.mark.parity

SAMPLED = ("mixtral", "gpt_oss")
FAMILIES = [pytest.param(family, marks=() if family in SAMPLED else pytest.mark.slow) for family in routing.FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_native_routing_is_as_near_to_float32_as_that_of_transformers(family: str, tmp_path: Path):
    """Each of some 8,000 token-layers in bfloat16 beside the same weights in float32, by transformers."""
    need_native_kernels()
    differing = routing.measure(family, tmp_path)["differing"]
    theirs = [differing["float32 | eager"], differing["float32 | grouped_mm"]]
    assert differing["eager | grouped_mm"] > 0, "the comparison sees what rounding does"
    assert 0 < differing["native | float32"] <= 1.1 * max(theirs)
