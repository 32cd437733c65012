"""Prediction layers of the hybrid families, from the modules of transformers, which has no model with such a layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from rayserve_moe import Engine
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.scheduling.sequence import Sequence as Running
from tests.pipelines.test_draft_models import logits_of_rows
from tests.support.engine.run_requests import run_together
from tests.support.engine.workload import request_for
from tests.support.models.families import FAMILY_CASES
from tests.support.speculation.random_requests import DRAFTS, PLAIN

comparison = pytest.importorskip("tests.parity.family_comparison", reason="the live comparison needs torch")
live = pytest.importorskip("tests.parity.family_reference", reason="the live comparison needs torch: `make parity`")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parity

CASES = ("qwen3_next-0", "qwen3_next-1", "qwen3_5_moe_text-0")
"""The last layer of the second is recurrent."""
MAX_DIFFERENCE = 2 * comparison.MAX_RECURRENT_DIFFERENCE
"""Bound relative to the largest feature or logit.

The layer reads features of the target, which differ from transformers as much as its logits do. It adds a difference of
its own. Measured: 2.6e-4 behind 64 tokens, 1e-5 before.
"""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_running_requests": PLAIN.num_rows,
    "max_step_tokens": PLAIN.step_tokens,
    "precompile_bs_paddings": [PLAIN.num_rows],
    "num_pages": PLAIN.num_pages,
    "page_size": PLAIN.page_size,
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": DRAFTS,
}


class PredictionReference:
    """A model of transformers with a random prediction layer: norms of both inputs, a product, a layer, a norm."""

    def __init__(self, model: Any, *, seed: int) -> None:
        config = copy.deepcopy(model.config)
        if getattr(config, "mlp_only_layers", None):
            config.mlp_only_layers = []
        self._model = model
        full = config.layer_types.index("full_attention")
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        norm_class, width = type(model.model.norm), config.hidden_size
        parts = {name: norm_class(width, eps=config.rms_norm_eps) for name in norms}
        layers = torch.nn.ModuleList([type(model.model.layers[full])(config, full)])
        fc = torch.nn.Linear(2 * width, width, bias=False)
        self.parts = torch.nn.ModuleDict({**parts, "fc": fc, "layers": layers}).eval()
        live.perturb(self.parts, torch.Generator().manual_seed(seed), width=width)

    def tensors(self) -> dict[str, np.ndarray]:
        """Tensors of the layer, with experts in the form that the modules have."""
        return {f"mtp.{name}": array.numpy() for name, array in self.parts.state_dict().items()}

    @torch.no_grad()
    def ahead(self, token_ids: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return features [count, D], logits [count, V] and ids of `count` drafts after a sequence."""
        known = list(token_ids[1:])
        made = self._model.model(torch.tensor([list(token_ids[:-1])]), use_cache=False).last_hidden_state
        features, logits, drafts = [], [], []
        for _ in range(count):
            out = self._step(torch.tensor([known]), made)
            features.append(out[0, -1].numpy())
            logits.append(self._model.lm_head(out[0, -1]).numpy())
            drafts.append(int(logits[-1].argmax()))
            known.append(drafts[-1])
            made = torch.cat([made, out[:, -1:]], dim=1)
        return np.stack(features), np.stack(logits), drafts

    def _step(self, token_ids: Any, features: Any) -> Any:
        parts, length = self.parts, token_ids.shape[1]
        embedded = parts["pre_fc_norm_embedding"](self._model.model.embed_tokens(token_ids))
        hidden = parts["fc"](torch.cat([embedded, parts["pre_fc_norm_hidden"](features)], dim=-1))
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rotation = self._model.model.rotary_emb(hidden, positions)
        hidden = parts["layers"][0](hidden, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return parts["norm"](hidden)


def written(name: str, directory: Path) -> tuple[Path, PredictionReference]:
    case = next(case for case in FAMILY_CASES if case.name == name)
    config = AutoConfig.for_model(case.family, **copy.deepcopy(case.config))
    model = live.FamilyReference(live.random_model(config, seed=case.variant + 1))
    path = model.save(directory)
    reference = PredictionReference(model.model, seed=7)
    tensors = load_file(path / "model.safetensors") | reference.tensors()
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in tensors, "beside a decoder with a tensor per expert"
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path, reference


@pytest.mark.parametrize("name", CASES)
def test_features_logits_and_drafts_are_those_of_the_modules(tmp_path: Path, name: str, record_property: Any):
    path, reference = written(name, tmp_path)
    proposer, differences = ModelProposer("drafts"), []
    prompts = np.random.default_rng(1).integers(3, 128, 70)
    requests = [request_for(prompts[:55], max_new_tokens=16), request_for(prompts[20:70], max_new_tokens=9)]
    with Engine(str(path), **SETTINGS) as engine:
        logits_of = logits_of_rows(engine.runner)

        def check(cycle: StepCycle, _: int) -> Iterable[Running]:
            for sequence in (each for each in cycle.scheduler.running if each.num_outputs):
                features, logits, drafts = reference.ahead(sequence.token_ids[: sequence.num_tokens].tolist(), DRAFTS)
                (row,) = (row for row, other in enumerate(cycle.scheduler.table.sequences) if other is sequence)
                kept = np.asarray(engine.runner.state.draft.features_RD)[row]
                found = logits_of()[row]
                differences.append(np.abs(kept - features[0]).max() / np.abs(features[0]).max())
                differences.append(np.abs(found - logits[0]).max() / np.abs(logits[0]).max())
                assert proposer.propose(sequence, DRAFTS).tolist() == drafts
            return ()

        way = replace(PLAIN, proposer=proposer, num_drafts=DRAFTS, intervene=check, overlaps=False, constraints=None)
        run_together(engine.runner, engine.card, requests, way=replace(way, with_capture=False))
    record_property("logit difference", max(differences))
    assert len(differences) > 20 and max(differences) <= MAX_DIFFERENCE
