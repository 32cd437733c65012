"""Weights are the same in every form of a family's files: names, nesting, a tensor per expert or one for all."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.synthetic import SyntheticModel, write_checkpoint
from rayserve_moe.execution.card import check_tensors
from rayserve_moe.model.family_table import family_of
from rayserve_moe.model.spec import UnsupportedModelError
from rayserve_moe.requests.records import WeightsRefusedError
from tests.support.checkpoints.fused_experts import fused_tensors
from tests.support.models.families import FAMILY_CASES, config_of
from tests.unit.execution.test_staged_weights import loaded

Tensors = dict[str, np.ndarray]
NESTED = "model.language_model."
PREFIX = "language_model."
OUTER = ("dtype", "tie_word_embeddings", "quantization_config")


def plain(directory: Path, family: str, *, seed: int = 1, **changes: Any) -> Path:
    """A checkpoint with a tensor per expert, of the architecture for text."""
    case = next(case for case in FAMILY_CASES if case.name == f"{family}-0")
    model = SyntheticModel(config_of(case, vocab_size=264, **changes))
    return write_checkpoint(directory, model, seed=seed, dtype="float32")


def rewritten(path: Path, directory: Path, *changes: Callable[[Tensors], Tensors], config: Any = None) -> Path:
    """A copy with other tensors, and another config if given."""
    copy = shutil.copytree(path, directory)
    tensors = load_file(copy / "model.safetensors")
    for change in changes:
        tensors = change(tensors)
    save_file(tensors, copy / "model.safetensors")
    if config is not None:
        (copy / "config.json").write_text(json.dumps(config))
    return copy


def with_fused_experts(tensors: Tensors) -> Tensors:
    return fused_tensors(tensors, "fused_out_in")


def nested(tensors: Tensors) -> Tensors:
    """As in a multimodal model, beside a vision tower."""
    named = {
        NESTED + name.removeprefix("model.") if name.startswith("model.") else name: array
        for name, array in tensors.items()
    }
    return named | {"model.visual.pos_embed.weight": np.ones((16, 16), np.float32)}


def below_prefix(tensors: Tensors) -> Tensors:
    """As in a multimodal model with all of the language model below one prefix, beside what reads images."""
    names = ("vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight")
    others = {name: np.ones(4, np.float32) for name in names}
    return {PREFIX + name: array for name, array in tensors.items()} | others


def nested_gemma(tensors: Tensors) -> Tensors:
    """As in a multimodal model: the language model below a prefix, beside what reads images and sound."""
    named = {name.replace("model.", NESTED, 1): array for name, array in tensors.items()}
    others = ("vision_tower.std_bias", "embed_vision.embedding_projection.weight", "audio_tower.output_proj.bias")
    return named | {f"model.{name}": np.ones(4, np.float32) for name in others}


MINIMAX_NAMES = {
    r"^language_model\.": "",
    r"\.block_sparse_moe\.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    r"\.block_sparse_moe\.": ".mlp.",
    r"\.w1\.": ".gate_proj.",
    r"\.w3\.": ".up_proj.",
    r"\.w2\.": ".down_proj.",
    r"self_attn\.index_": "self_attn.indexer.",
}


def text_of_minimax(tensors: Tensors) -> Tensors:
    """As the class for text writes them: a tensor for gate and up in experts, shared experts and dense layers."""
    renamed = {
        reduce(lambda name, pair: re.sub(*pair, name), MINIMAX_NAMES.items(), name): array
        for name, array in tensors.items()
    }
    found = with_fused_experts(renamed)
    for name in [name for name in found if name.endswith(".gate_proj.weight")]:
        both = [found.pop(name), found.pop(name.replace(".gate_", ".up_"))]
        found[name.replace(".gate_", ".gate_up_")] = np.concatenate(both)
    return found


def multimodal_config(path: Path) -> dict[str, Any]:
    text = json.loads((path / "config.json").read_text())
    outer = {key: text.pop(key) for key in OUTER if key in text}
    return {
        **outer,
        "architectures": [family_of(text).OTHER_ARCHITECTURES[0]],
        "text_config": text,
        "vision_config": {"depth": 1},
    }


FORMS: dict[str, tuple[str, tuple[Callable[[Tensors], Tensors], ...], bool]] = {
    "qwen3_next, fused": ("qwen3_next", (with_fused_experts,), False),
    "fused": ("qwen3_5_moe_text", (with_fused_experts,), False),
    "multimodal": ("qwen3_5_moe_text", (nested,), True),
    "multimodal and fused": ("qwen3_5_moe_text", (with_fused_experts, nested), True),
    "text with nested names": ("qwen3_5_moe_text", (nested,), False),
    "gemma4, multimodal": ("gemma4_text", (nested_gemma,), True),
    "mistral4, multimodal": ("mistral4", (below_prefix,), True),
    "minimax_m3, text": ("minimax_m3_vl_text", (text_of_minimax,), False),
    "multimodal with names of text": ("qwen3_5_moe_text", (), True),
}


def in_form(path: Path, directory: Path, form: str) -> Path:
    _, changes, is_multimodal = FORMS[form]
    return rewritten(path, directory, *changes, config=multimodal_config(path) if is_multimodal else None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_weights_do_not_depend_on_the_form_of_files(tmp_path: Path, form: str, mesh: tuple[int, int]):
    path = plain(tmp_path / "plain", FORMS[form][0])
    other = in_form(path, tmp_path / "other", form)
    check_tensors(open_checkpoint(other))
    expected, found = (loaded(each, mesh=mesh, num_redundant=4).weights.params for each in (path, other))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_a_form_replace_those_of_another(tmp_path: Path, form: str):
    family = FORMS[form][0]
    first, second = (plain(tmp_path / f"plain{seed}", family, seed=seed) for seed in (1, 2))
    served = in_form(first, tmp_path / "served", form)
    runner = loaded(served)
    runner.staged.read(str(second))
    runner.weights = runner.staged.take(runner.weights)
    jax.tree.map(np.testing.assert_array_equal, runner.weights.params, loaded(second).weights.params)
    runner.staged.read(str(served))
    runner.weights = runner.staged.take(runner.weights)
    jax.tree.map(np.testing.assert_array_equal, runner.weights.params, loaded(first).weights.params)


def test_senders_use_the_names_of_the_files(tmp_path: Path):
    path = in_form(plain(tmp_path / "plain", "qwen3_5_moe_text"), tmp_path / "other", "multimodal and fused")
    runner = loaded(path, dtype="bfloat16")
    held = runner.tensors.unstarted().float32_tensors
    assert f"{NESTED}layers.*.input_layernorm.weight" in held
    runner.tensors.begin(None)
    both = f"{NESTED}layers.0.mlp.experts.gate_up_proj"
    heads = [("model.visual.pos_embed.weight", (16, 16)), (both, (8, 64, 64)), ("mtp.fc.weight", (64, 128))]
    vision, experts, prediction = runner.tensors.wanted(heads)
    assert not vision.regions and not prediction.regions
    assert {region[0] for region in experts.regions} == {(expert, expert + 1) for expert in range(8)}
    with pytest.raises(WeightsRefusedError, match=r"has no tensor model\.layers\.0\.mlp\.gate\.weight"):
        runner.tensors.wanted([("model.layers.0.mlp.gate.weight", (8, 64))])


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: array for name, array in tensors.items() if part not in name}


def fused_but_in_layer_1(tensors: Tensors) -> Tensors:
    kept = {name: array for name, array in tensors.items() if "layers.1.mlp.experts" in name}
    return with_fused_experts({name: array for name, array in tensors.items() if name not in kept}) | kept


def swapped(tensors: Tensors) -> Tensors:
    """Experts as other families have them, inputs before outputs."""
    return {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if "experts.down_proj" in name else array
        for name, array in tensors.items()
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            (fused_but_in_layer_1,),
            r"2 tensors missing: model\.layers\.1\.mlp\.experts\.gate_up_proj .*24 tensors unexp",
        ),
        ((with_fused_experts, swapped), r"4 tensors misshapen: .*experts\.down_proj in .* expected \[8, 64, 32\]"),
        ((with_fused_experts, without("layers.2.mlp.experts.down")), r"1 tensor missing: .*layers\.2\..*down_proj"),
        ((nested, without("layers.3.self_attn.q_proj")), rf"1 tensor missing: {NESTED}layers\.3\.self_attn\.q_proj"),
        (
            (lambda tensors: tensors | {"model.audio.w": np.ones(1, np.float32)},),
            r"1 tensor unexpected: model\.audio\.w",
        ),
    ],
    ids=["both forms", "orientation", "an absent tensor", "an absent nested tensor", "an unknown tower"],
)
def test_files_that_fit_no_form_are_refused_by_their_tensors(tmp_path: Path, changes: Any, message: str):
    path = rewritten(plain(tmp_path / "plain", "qwen3_5_moe_text"), tmp_path / "other", *changes)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(open_checkpoint(path))


@pytest.mark.parametrize("value", [0, [], "text", {}])
def test_a_text_config_of_another_kind_is_refused(tmp_path: Path, value: Any):
    path = plain(tmp_path / "plain", "qwen3_5_moe_text")
    config = {**multimodal_config(path), "text_config": value}
    path = rewritten(path, tmp_path / "other", nested, config=config)
    with pytest.raises(
        UnsupportedModelError, match="text_config must be an object" if value != {} else "num_attention_heads"
    ):
        check_tensors(open_checkpoint(path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act = 'gelu'"),
        ("attn_output_gate", False, "attn_output_gate = False"),
        ("num_experts", 0, "num_experts must be a positive integer"),
    ],
)
def test_values_of_a_text_config_are_refused_by_key(tmp_path: Path, key: str, value: Any, message: str):
    path = plain(tmp_path / "plain", "qwen3_5_moe_text")
    config = multimodal_config(path)
    config["text_config"][key] = value
    path = rewritten(path, tmp_path / "other", nested, config=config)
    with pytest.raises(UnsupportedModelError, match=message):
        check_tensors(open_checkpoint(path))
