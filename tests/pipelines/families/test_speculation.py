"""What drafts change is time: models of other families, drafted for by their own prediction layers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rayserve_moe import Engine
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import LOGPROB_TOLERANCE, RECURRENT_TOLERANCE, assert_same
from tests.support.engine.run_requests import cycle_for, run_on, run_together, speculation_of
from tests.support.engine.workload import request_for
from tests.support.models.families import FAMILY_CASES, FamilyCase, write_family
from tests.support.speculation.draft_checkpoints import with_prediction_layer
from tests.support.speculation.random_requests import DRAFTS, PLAIN, SPECULATES, random_requests

BEHIND = ("deepseek_v3-0", "glm4_moe-0", "deepseek_v32-0", "glm_moe_dsa-1")
"""Models whose prediction layer follows the last layer and has its kind."""
BESIDE = ("qwen3_next-0", "qwen3_next-1", "qwen3_5_moe_text-0", "bailing_hybrid-0", "nemotron_h-0", "nemotron_h-1")
"""Models with recurrent layers. The prediction layer has full attention, even if the last layer is recurrent."""
SILENT = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def cases(*names: str, quick: str = "") -> pytest.MarkDecorator:
    """Cases by their names; all but the `quick` one are slow."""
    chosen = [case for case in FAMILY_CASES if case.name in names]
    marks = {case.name: () if case.name == quick else pytest.mark.slow for case in chosen}
    params = [pytest.param(case, id=case.name, marks=marks[case.name]) for case in chosen]
    return pytest.mark.parametrize("case", params, indirect=True)


def predicting(case: FamilyCase, path: Path, target: Path, *, dtype: str) -> Path:
    """The model with a random prediction layer."""
    if case.name in BEHIND:
        return with_prediction_layer(path, target)
    return write_family(case, path, seed=5, dtype=dtype, mtp_num_hidden_layers=1)


def never_wrong(path: Path, directory: Path) -> Path:
    """A model whose layers add nothing, and whose prediction layer passes on the embedding.

    The next token follows from a token's embedding alone, so that the prediction layer knows the one after it, if its
    norms are one, and the embedding stands ahead of the hidden state.
    """
    copy = shutil.copytree(path, directory)
    tensors = load_file(copy / "model.safetensors")
    for name, array in tensors.items():
        if name.endswith(SILENT) or name.endswith("norm.weight") or "pre_fc_norm" in name:
            tensors[name] = np.zeros_like(array)
    width = len(tensors["mtp.fc.weight"])
    tensors["mtp.fc.weight"] = np.eye(width, 2 * width, dtype=tensors["mtp.fc.weight"].dtype)
    save_file(tensors, copy / "model.safetensors")
    return copy


@cases(*BEHIND, *BESIDE)
def test_drafts_of_its_own_prediction_layer_do_not_show(
    engine_with: EngineStore, core_checkpoint: Path, case: FamilyCase, dtype: str, tmp_path: Path
):
    path = predicting(case, tmp_path / "model", core_checkpoint, dtype=dtype)
    drafts = {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": str(path)}
    engine = engine_with(**SPECULATES | drafts)
    requests = random_requests(0, count=24, layout=engine.card.routing)
    plain = run_together(engine.runner, engine.card, requests, way=PLAIN)
    way = replace(PLAIN, proposer=ModelProposer("drafts"), num_drafts=DRAFTS)
    found = run_together(engine.runner, engine.card, requests, way=way)
    assert found.keys() == plain.keys()
    tolerance = LOGPROB_TOLERANCE if case.name in BEHIND else RECURRENT_TOLERANCE
    for key, outcome in plain.items():
        assert_same(found[key], outcome, routing=outcome.routing is not None, tolerance=tolerance)


@pytest.mark.slow
@cases("qwen3_next-0", "qwen3_5_moe_text-0", quick="qwen3_5_moe_text-0")
def test_drafts_that_are_never_wrong_are_accepted(case: FamilyCase, dtype: str, tmp_path: Path):
    model = write_family(case, tmp_path / "model", seed=5, dtype=dtype, mtp_num_hidden_layers=1)
    path = never_wrong(model, tmp_path / "right")
    assert json.loads((path / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    prompts = np.random.default_rng(3).integers(3, 200, (4, 50))
    greedy = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    requests = [request_for(prompt, f"{number}", **greedy) for number, prompt in enumerate(prompts)]
    plain_sampling = {"structured_output": False, "logit_processors": "", "enable_return_hidden_states": False}
    one_shape = {"precompile_bs_paddings": [PLAIN.num_rows * (1 + DRAFTS)]}
    settings = {**SPECULATES, **plain_sampling, **one_shape, "speculative_algorithm": "NEXTN"}
    way = replace(PLAIN, constraints=None)
    with Engine(str(path), num_pages=PLAIN.num_pages, page_size=PLAIN.page_size, **settings) as engine:
        plain = run_together(engine.runner, engine.card, requests, way=replace(way, with_capture=False))
        drafting = replace(way, with_capture=False, proposer=ModelProposer("drafts"), num_drafts=DRAFTS)
        cycle = cycle_for(engine.runner, engine.card, drafting)
        found = run_on(cycle, engine.card, requests)
    for key, outcome in plain.items():
        assert_same(found[key], outcome, routing=False)
    totals = speculation_of(cycle).totals
    assert totals.accepted == totals.drafted > 4 * 20
