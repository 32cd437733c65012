"""Weights change while drafts are verified: every log-prob and row is still of the weights that the answer names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from rayserve_moe import Engine
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.speculation.model_drafts import proposer_for
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.steps import DraftedSteps
from tests.pipelines import test_weight_updates as updates
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.schedulers import some_reach
from tests.support.engine.shared_settings import ONE_BUCKET
from tests.support.speculation.draft_checkpoints import write_eagle_head
from tests.support.speculation.random_requests import DRAFTS

pytestmark = pytest.mark.slow

paths, reference = updates.paths, updates.reference
test_versions = updates.test_every_log_prob_and_row_is_of_the_weights_that_the_answer_names
test_spans = updates.test_an_answer_that_spans_versions_names_each_of_them
test_retraction = updates.test_a_retraction_or_a_freeze_does_not_show_in_what_comes_out


@pytest.fixture(params=["NGRAM", "EAGLE3"])
def speculating(
    request: pytest.FixtureRequest, engine_with: EngineStore, core_checkpoint: Path, tmp_path_factory
) -> Engine:
    """An engine whose drafts come from the host, after each step, or stay on the devices, where steps overlap."""
    settings = {"speculative_algorithm": request.param, "speculative_num_steps": DRAFTS}
    if request.param == "EAGLE3":
        head = tmp_path_factory.getbasetemp() / "head-of-core"
        if not head.exists():
            write_eagle_head(head, json.loads((core_checkpoint / "config.json").read_text()), num_words=100)
        settings["speculative_draft_model_path"] = str(head)
    return engine_with(**ONE_BUCKET, **updates.CHANGING, **settings)


@pytest.fixture
def changing(speculating: Engine) -> Iterator[Engine]:
    """All steps have drafts, and some of them are right, if they are no guesses of random weights."""
    cycle = speculating.loop._cycle
    proposer = proposer_for(replace(speculating.runner.served.settings.speculation, min_match=1))
    fixed = Speculation(cycle.scheduler.table, proposer, max_drafts=DRAFTS, is_fixed=True, reach=some_reach())
    with patch.object(extension_of(cycle.extensions, DraftedSteps), "speculation", fixed):
        yield speculating
    assert fixed.totals.drafted > fixed.totals.accepted
    assert fixed.overlaps or fixed.totals.accepted > 0
