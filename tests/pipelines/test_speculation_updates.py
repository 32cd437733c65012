"""Weights change while drafts are verified: every log-prob and row is still of the weights that the answer names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.proposers import NgramProposer
from rayserve_moe.engine.speculation import Speculation
from tests.pipelines import test_weight_updates as updates
from tests.support.engine_store import EngineStore
from tests.support.engines import ONE_BUCKET
from tests.support.scheduling import some_reach
from tests.support.speculating import DRAFTS

pytestmark = pytest.mark.slow

paths, reference = updates.paths, updates.reference
test_versions = updates.test_every_log_prob_and_row_is_of_the_weights_that_the_answer_names
test_spans = updates.test_an_answer_that_spans_versions_names_each_of_them
test_retraction = updates.test_a_retraction_or_a_freeze_does_not_show_in_what_comes_out
SPECULATES = {"speculative_algorithm": "NGRAM", "speculative_num_steps": DRAFTS}


@pytest.fixture
def speculating(engine_with: EngineStore) -> Engine:
    return engine_with(**ONE_BUCKET, **updates.CHANGING, **SPECULATES)


@pytest.fixture
def changing(speculating: Engine) -> Iterator[Engine]:
    """All steps have drafts, and some of them are right."""
    cycle = speculating.loop._cycle
    proposer = NgramProposer(replace(speculating.runner.served.settings.speculation, shortest_match=1))
    fixed = Speculation(cycle.scheduler.table, proposer, most_drafts=DRAFTS, is_fixed=True, reach=some_reach())
    with patch.object(cycle, "speculation", fixed):
        yield speculating
    assert fixed.totals.drafted > fixed.totals.accepted > 0
