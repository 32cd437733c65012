"""A token has the same bits in any step, for every family."""

from __future__ import annotations

import pytest

from rayserve_moe import Engine
from tests.pipelines import test_invariant_products as invariance
from tests.pipelines.families.conftest import families
from tests.support.engine.engine_store import EngineStore

pytestmark = [pytest.mark.slow, families()]

FEWEST_STEPS = {"precompile_bs_paddings": [1, 256]}
expected = invariance.expected


@pytest.fixture(scope="module")
def invariant(engine_with: EngineStore, is_native: bool) -> Engine:
    kernels = "native" if is_native else "off"
    return engine_with(**{**invariance.SETTINGS, **FEWEST_STEPS, "cpu_kernels": kernels})


test_a_step_does_not_show = invariance.test_a_step_does_not_show_in_any_bit
test_a_batch_does_not_show = invariance.test_a_batch_does_not_show_in_any_bit
test_a_cached_prompt_does_not_show = invariance.test_a_cached_prompt_does_not_show_in_any_bit
test_drafts_do_not_show = invariance.test_right_and_wrong_drafts_do_not_show_in_any_bit
test_scores = invariance.test_a_prompt_that_was_sampled_scores_as_it_was_sampled
