"""Log-probs and rows of the weights that an answer names: laws of the core model, held over a model of every family."""

from __future__ import annotations

import pytest

from tests.pipelines import test_weight_updates as updates
from tests.pipelines.families.conftest import families

pytestmark = [pytest.mark.slow, families()]

changing, paths, reference = updates.changing, updates.paths, updates.reference
test_versions = updates.test_every_log_prob_and_row_is_of_the_weights_that_the_answer_names
test_old_prefixes = updates.test_cached_prefixes_of_old_weights_are_never_found_again
