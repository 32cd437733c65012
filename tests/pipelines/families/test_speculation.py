"""What drafts change is time: models of other families, drafted for by their own prediction layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import assert_same
from tests.support.engine.run_requests import run_together
from tests.support.models.families import FAMILY_CASES
from tests.support.speculation.draft_checkpoints import with_prediction_layer
from tests.support.speculation.random_requests import DRAFTS, PLAIN, SPECULATES, random_requests

PREDICT = ("deepseek_v3-0", "glm4_moe-0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in FAMILY_CASES if case.name in PREDICT], indirect=True
)
def test_drafts_of_its_own_prediction_layer_do_not_show(
    engine_with: EngineStore, core_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
):
    path = with_prediction_layer(tmp_path_factory.mktemp("drafts") / "model", core_checkpoint)
    drafts = {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": str(path)}
    engine = engine_with(**SPECULATES | drafts)
    requests = random_requests(0, count=24, layout=engine.card.routing)
    plain = run_together(engine.runner, engine.card, requests, way=PLAIN)
    way = replace(PLAIN, proposer=ModelProposer("drafts"), num_drafts=DRAFTS)
    found = run_together(engine.runner, engine.card, requests, way=way)
    assert found.keys() == plain.keys()
    for key, outcome in plain.items():
        assert_same(found[key], outcome, routing=outcome.routing is not None)
