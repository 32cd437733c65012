"""The bits of a token in any step, for every family."""

from __future__ import annotations

import pytest

from tests.pipelines import test_invariant_products as invariance
from tests.pipelines.families.conftest import families

pytestmark = [pytest.mark.slow, families()]

invariant, expected = invariance.invariant, invariance.expected
test_a_step_does_not_show = invariance.test_a_step_does_not_show_in_any_bit
test_a_batch_does_not_show = invariance.test_a_batch_does_not_show_in_any_bit
test_a_cached_prompt_does_not_show = invariance.test_a_cached_prompt_does_not_show_in_any_bit
test_drafts_do_not_show = invariance.test_right_and_wrong_drafts_do_not_show_in_any_bit
test_a_replica_has_the_same_bits = invariance.test_a_replica_with_other_steps_has_the_same_bits
test_scores = invariance.test_a_prompt_that_was_sampled_scores_as_it_was_sampled
