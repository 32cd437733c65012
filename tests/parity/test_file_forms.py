"""Forms in which transformers writes the files of a family, served in float32, against transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rayserve_moe import Engine
from tests.support.checkpoints.fused_experts import fused_tensors
from tests.support.models.families import FAMILY_CASES

comparison = pytest.importorskip("tests.parity.family_comparison", reason="the live comparison needs torch")
live = pytest.importorskip("tests.parity.family_reference", reason="the live comparison needs torch: `make parity`")

pytestmark = pytest.mark.parity

VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": 16, "patch_size": 4,
}  # fmt: skip
GEMMA_VISION = {
    "model_type": "gemma4_vision", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 2, "intermediate_size": 32, "patch_size": 4, "position_embedding_size": 16,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
"""Sections of the rotation by time, height and width; for text all three have the same positions."""


@dataclass(frozen=True)
class Form:
    """A way in which transformers comes to write a checkpoint."""

    name: str
    case: str
    multimodal: Callable[[dict[str, Any]], Any] | None = None
    """Wraps a text config into the multimodal config around it; None for text models."""
    is_fused: bool = False
    """Read from files that have the experts of a layer in two tensors."""
    rereads: Any = None
    """Class that reads the files and writes them again."""
    wanted: str = ""
    """A tensor by which the form is known."""


def in_qwen(text: dict[str, Any]) -> Any:
    """Return the config of Qwen3.5 with a language model."""
    text["rope_parameters"] = {**ROPE, **text.get("rope_parameters", {}), **SECTIONS}
    return AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=copy.deepcopy(VISION))


def in_mistral(text: dict[str, Any]) -> Any:
    """Return the config of Mistral 3 with a language model of Mistral 4."""
    text = {"model_type": "mistral4", **text}
    return AutoConfig.for_model("mistral3", text_config=text, vision_config=copy.deepcopy(PIXTRAL))


def in_minimax(text: dict[str, Any]) -> Any:
    """Return the config of MiniMax-M3 with a language model."""
    text = {"model_type": "minimax_m3_vl_text", **text}
    vision = {**PIXTRAL, "model_type": "minimax_m3_vl_vision", "hidden_size": 24}
    return AutoConfig.for_model("minimax_m3_vl", text_config=text, vision_config=vision, projector_hidden_size=64)


def in_gemma(text: dict[str, Any]) -> Any:
    """Return the config of Gemma 4 with a language model."""
    return AutoConfig.for_model("gemma4", text_config={"model_type": "gemma4_text", **text}, vision_config=GEMMA_VISION)


_EXPERTS, _NESTED = "layers.0.mlp.experts.", "model.language_model.layers.0.mlp.experts."
FORMS = (
    Form("fused", "qwen3_next-0", None, True, AutoModelForCausalLM, f"model.{_EXPERTS}gate_up_proj"),
    Form("fused", "qwen3_5_moe_text-0", None, True, AutoModelForCausalLM, f"model.{_EXPERTS}gate_up_proj"),
    Form("multimodal", "qwen3_5_moe_text-0", in_qwen, wanted=f"{_NESTED}0.gate_proj.weight"),
    Form("multimodal-tied", "qwen3_5_moe_text-2", in_qwen, wanted=f"{_NESTED}0.gate_proj.weight"),
    Form(
        "multimodal-fused",
        "qwen3_5_moe_text-0",
        in_qwen,
        True,
        AutoModelForImageTextToText,
        f"{_NESTED}gate_up_proj",
    ),
    Form(
        "language-model-of-multimodal",
        "qwen3_5_moe_text-0",
        in_qwen,
        False,
        AutoModelForCausalLM,
        f"{_NESTED}0.gate_proj.weight",
    ),
    Form("multimodal", "mistral4-0", in_mistral, wanted=f"language_model.model.{_EXPERTS}gate_up_proj"),
    Form(
        "multimodal",
        "minimax_m3_vl_text-0",
        in_minimax,
        wanted="language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight",
    ),
    Form(
        "multimodal-tied",
        "minimax_m3_vl_text-2",
        in_minimax,
        wanted="language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight",
    ),
    Form("multimodal", "gemma4_text-1", in_gemma, wanted="model.language_model.layers.0.experts.gate_up_proj"),
    Form("multimodal-tied", "gemma4_text-0", in_gemma, wanted="model.language_model.layers.0.router.per_expert_scale"),
)
"""One is of the architecture of text models, with the tensor names of the multimodal one."""


def written(form: Form, directory: Path) -> tuple[Path, Any]:
    """The checkpoint of a form, and the model of transformers that it was written from."""
    case = next(case for case in FAMILY_CASES if case.name == form.case)
    if form.multimodal:
        config, kind = form.multimodal(copy.deepcopy(case.config)), AutoModelForImageTextToText
        config.tie_word_embeddings = case.config.get("tie_word_embeddings", False)
    else:
        config, kind = AutoConfig.for_model(case.family, **copy.deepcopy(case.config)), AutoModelForCausalLM
    reference = live.FamilyReference(live.random_model(config, kind, seed=case.variant + 1))
    path = reference.save(directory / "first")
    if form.is_fused:
        tensors = fused_tensors(load_file(path / "model.safetensors"), "fused_out_in")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if form.rereads:
        path = live.FamilyReference(form.rereads.from_pretrained(path)).save(directory / "second")
    return path, reference


@pytest.fixture(scope="module", params=[pytest.param(form, id=f"{form.case}-{form.name}") for form in FORMS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any]]:
    path, model = written(request.param, tmp_path_factory.mktemp("form"))
    assert request.param.wanted in load_file(path / "model.safetensors")
    reference = comparison.reference_of(model, seed=0, case=request.param.case)
    with ExitStack() as running:
        yield running.enter_context(Engine(str(path), **comparison.ENGINE)), reference


def test_every_form_of_files_is_served(served: tuple[Engine, Any], record_property: Any):
    engine, reference = served
    outputs = comparison.outputs_of(engine, reference)
    difference = comparison.logit_difference([each.logits_TV for each in outputs], reference.scored)
    record_property("logit difference", difference)
    record_property("logit difference of the reference in float32", reference.own_difference)
    assert difference <= reference.max_difference
    answers = comparison.answers_of(engine, reference.prompts)
    comparison.assert_same_answers(answers, reference)
    num_differing, num_rows = comparison.differing_rows(answers, reference, engine.runner.config.spec)
    assert num_differing <= 1e-3 * num_rows
