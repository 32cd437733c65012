"""Prediction layers of the hybrid families, from the modules of transformers, which has no model with such a layer."""

from __future__ import annotations

import copy
import tempfile
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
no_float32 = pytest.importorskip("tests.parity.float64", reason="float64 is torch's").no_float32

pytestmark = pytest.mark.parity

CASES = [
    *("qwen3_next-0", "qwen3_next-1", "qwen3_5_moe_text-0", "nemotron_h-0", "nemotron_h-1"),
    *(pytest.param(f"bailing_hybrid-{variant}", marks=pytest.mark.slow) for variant in range(3)),
]
"""qwen3_next-1 and bailing_hybrid-2 end with a recurrent layer; nemotron_h-1 has latent experts."""
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
        self.model = model
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

    def step(self, token_ids: Any, features: Any) -> Any:
        """Return the features of the next tokens."""
        parts, length = self.parts, token_ids.shape[1]
        embedded = parts["pre_fc_norm_embedding"](self.model.model.embed_tokens(token_ids))
        hidden = parts["fc"](torch.cat([embedded, parts["pre_fc_norm_hidden"](features)], dim=-1))
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(hidden, positions)
        hidden = parts["layers"][0](hidden, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return parts["norm"](hidden)


class NemotronPrediction:
    """A model of transformers with attention and experts of a random prediction layer, in a block each."""

    def __init__(self, model: Any, *, seed: int) -> None:
        config = model.config
        self.model = model
        norm_class, block_class = type(model.model.norm_f), type(model.model.layers[0])
        norms = {
            name: norm_class(config.hidden_size, eps=config.layer_norm_epsilon)
            for name in ("0.enorm", "0.hnorm", "1.final_layernorm")
        }
        blocks = [
            block_class(config, config.layers_block_type.index(kind)).eval() for kind in ("full_attention", "moe")
        ]
        fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        named = {name.replace(".", "_"): norm for name, norm in norms.items()}
        self.parts = torch.nn.ModuleDict({**named, "0_eh_proj": fc, "0": blocks[0], "1": blocks[1]}).eval()
        live.perturb(self.parts, torch.Generator().manual_seed(seed), width=config.hidden_size)

    def tensors(self) -> dict[str, np.ndarray]:
        """Tensors of the layer under public loaders' names, each expert apart."""
        found = {}
        for name, array in self.parts.state_dict().items():
            name = f"mtp.layers.{name.replace('_', '.', 1) if name[1] == '_' else name}"
            if ".experts." in name:
                prefix, _, part = name.rpartition(".")
                found |= {f"{prefix}.{expert}.{part}.weight": own.numpy() for expert, own in enumerate(array)}
            else:
                found[name] = array.numpy()
        return found

    def step(self, token_ids: Any, features: Any) -> Any:
        """Return the features of the next tokens."""
        parts, length = self.parts, token_ids.shape[1]
        embedded = parts["0_enorm"](self.model.model.embeddings(token_ids))
        hidden = parts["0_eh_proj"](torch.cat([embedded, parts["0_hnorm"](features)], dim=-1))
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        hidden = parts["0"](hidden, attention_mask=mask, position_ids=torch.arange(length)[None])
        return parts["1_final_layernorm"](parts["1"](hidden))


class LingPrediction:
    """A model of transformers with a random prediction layer of Ling 3.0: latent attention and experts."""

    def __init__(self, model: Any, *, seed: int) -> None:
        config = copy.deepcopy(model.config)
        config.mlp_layer_types = ["sparse"] * config.num_hidden_layers
        self.model = model
        norm_class, width = type(model.model.norm), config.hidden_size
        norms = {name: norm_class(width, eps=config.rms_norm_eps) for name in ("enorm", "hnorm", "final_layernorm")}
        layer = type(model.model.layers[0])(config, config.layer_types.index("full_attention"))
        fc = torch.nn.Linear(2 * width, width, bias=False)
        self.parts = torch.nn.ModuleDict({**norms, "eh_proj": fc, "layer": layer}).eval()
        live.perturb(self.parts, torch.Generator().manual_seed(seed), width=width)

    def tensors(self) -> dict[str, np.ndarray]:
        """Tensors of the layer behind the last one, with the names that transformers writes for a layer."""
        longer = copy.deepcopy(self.model)
        prefix = f"model.layers.{len(longer.model.layers)}."
        longer.model.layers.append(self.parts["layer"])
        with tempfile.TemporaryDirectory() as directory:
            longer.save_pretrained(directory)
            saved = load_file(Path(directory) / "model.safetensors")
        joining = {f"{name}.weight": self.parts[name] for name in ("enorm", "hnorm", "final_layernorm", "eh_proj")}
        return {name: array for name, array in saved.items() if name.startswith(prefix)} | {
            prefix + name: part.weight.detach().numpy() for name, part in joining.items()
        }

    def step(self, token_ids: Any, features: Any) -> Any:
        """Return the features of the next tokens."""
        parts, length = self.parts, token_ids.shape[1]
        embedded = parts["enorm"](self.model.model.embed_tokens(token_ids))
        hidden = parts["eh_proj"](torch.cat([embedded, parts["hnorm"](features)], dim=-1))
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(hidden, positions)
        hidden = parts["layer"](hidden, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
        return parts["final_layernorm"](hidden)


Reference = PredictionReference | NemotronPrediction | LingPrediction
REFERENCES: dict[str, type[Reference]] = {"nemotron_h": NemotronPrediction, "bailing_hybrid": LingPrediction}
"""By family, where it has one of its own."""


def exact_copy(reference: Reference) -> Reference:
    """Return a copy of the layer and its model in float64; call it within `no_float32`."""
    copied = copy.deepcopy(reference)
    for module in (copied.model, copied.parts):
        module.double()
    return copied


@torch.no_grad()
def ahead(reference: Reference, token_ids: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return features [count, D], logits [count, V] and ids of `count` drafts after a sequence."""
    model, known = reference.model, list(token_ids[1:])
    made = model.model(torch.tensor([list(token_ids[:-1])]), use_cache=False).last_hidden_state
    features, logits, drafts = [], [], []
    for _ in range(count):
        out = reference.step(torch.tensor([known]), made)
        features.append(out[0, -1].numpy())
        logits.append(model.lm_head(out[0, -1]).numpy())
        drafts.append(int(logits[-1].argmax()))
        known.append(drafts[-1])
        made = torch.cat([made, out[:, -1:]], dim=1)
    return np.stack(features), np.stack(logits), drafts


def difference(found: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest difference relative to the largest exact value."""
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def written(name: str, directory: Path) -> tuple[Path, Reference]:
    """Write a model with a random prediction layer; return its path and the layer."""
    case = next(case for case in FAMILY_CASES if case.name == name)
    config = AutoConfig.for_model(case.family, **copy.deepcopy(case.config))
    model = live.FamilyReference(live.random_model(config, seed=case.variant + 1))
    path = model.save(directory)
    reference = REFERENCES.get(case.family, PredictionReference)(model.model, seed=7)
    tensors = load_file(path / "model.safetensors") | reference.tensors()
    fused = "mtp.layers.0.mlp.experts.gate_up_proj"
    assert case.family in REFERENCES or fused in tensors, "beside a decoder with a tensor per expert"
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path, reference


@pytest.mark.parametrize("name", CASES)
def test_features_logits_and_drafts_are_those_of_the_modules(tmp_path: Path, name: str, record_property: Any):
    path, reference = written(name, tmp_path)
    exact = exact_copy(reference)
    proposer, differences, own_differences = ModelProposer("drafts"), [], []
    prompts = np.random.default_rng(1).integers(3, 128, 70)
    requests = [request_for(prompts[:55], max_new_tokens=16), request_for(prompts[20:70], max_new_tokens=9)]
    with Engine(str(path), **SETTINGS) as engine:
        logits_of = logits_of_rows(engine.runner)

        def check(cycle: StepCycle, _: int) -> Iterable[Running]:
            for sequence in (each for each in cycle.scheduler.running if each.num_outputs):
                ids = sequence.token_ids[: sequence.num_tokens].tolist()
                with no_float32():
                    features, logits, drafts = ahead(exact, ids, DRAFTS)
                own_features, own_logits, _ = ahead(reference, ids, 1)
                (row,) = (row for row, other in enumerate(cycle.scheduler.table.sequences) if other is sequence)
                kept = np.asarray(engine.runner.state.draft.features_RD)[row]
                found = logits_of()[row]
                differences.extend([difference(kept, features[0]), difference(found, logits[0])])
                own = (difference(own_features[0], features[0]), difference(own_logits[0], logits[0]))
                own_differences.extend(own)
                assert proposer.propose(sequence, DRAFTS).tolist() == drafts
            return ()

        way = replace(PLAIN, proposer=proposer, num_drafts=DRAFTS, intervene=check, overlaps=False, constraints=None)
        run_together(engine.runner, engine.card, requests, way=replace(way, with_capture=False))
    record_property("logit difference", max(differences))
    record_property("logit difference of the reference in float32", max(own_differences))
    assert len(differences) > 20
    assert max(differences) <= comparison.max_difference(max(own_differences))
