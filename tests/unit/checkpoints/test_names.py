"""Tensor names and places match one to one, and a checkpoint that does not fit is told so tensor by tensor."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.names import tensor_places, verify, walk
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.parameters import parameter_specs

SINGLE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def _tree(path: Path):
    return parameter_specs(spec_from_config(open_checkpoint(path).config), dtype="float32")


def _verify_changed(path: Path, directory: Path, change) -> str:
    """Rewrite the tensors of a checkpoint by `change` and return what `verify` says, or nothing."""
    copy = shutil.copytree(path, directory / "model")
    tensors = load_file(copy / SINGLE)
    change(tensors)
    save_file(tensors, copy / SINGLE)
    try:
        verify(open_checkpoint(copy), _tree(copy), rules=CHECKPOINT_RULES)
    except CheckpointError as error:
        return str(error)
    return ""


def test_places_fill_every_parameter_exactly_once(single):
    tree = _tree(single)
    filled = {path: np.zeros(spec.shape, int) for path, spec in walk(tree)}
    for (place,) in tensor_places(tree, CHECKPOINT_RULES).values():
        filled[place.path][place.stack_index] += 1
        assert filled[place.path][place.stack_index].shape == place.spec.piece_shape
    assert all((count == 1).all() for count in filled.values())


def test_layers_and_experts_keep_their_numbers(single):
    places = {name: place for name, (place,) in tensor_places(_tree(single), CHECKPOINT_RULES).items()}
    # Layer 1 is dense: layer 2 is the second of the MoE layers, and layer 1 the first of the dense ones.
    assert places[EXPERT].path == ("experts", "up_MPDF") and places[EXPERT].stack_index == (1, 3)
    assert places["model.layers.1.mlp.up_proj.weight"].stack_index == (0,)
    assert places["model.norm.weight"].stack_index == ()


def test_a_tree_of_any_depth_is_walked(single):
    tree = _tree(single)
    assert len(list(walk({"outer": {"inner": tree}}))) == len(list(walk(tree)))


def test_a_fitting_checkpoint_passes_in_one_file_and_in_several(single, indexed):
    for path in (single, indexed):
        verify(open_checkpoint(path), _tree(path), rules=CHECKPOINT_RULES)


def _without(*names: str):
    return lambda tensors: [tensors.pop(name) for name in names]


def _with(name: str, values: np.ndarray):
    return lambda tensors: tensors.update({name: values})


MISFITS = {
    "missing": (_without(Q), ["1 tensor missing", f"{Q} (not in {SINGLE})"]),
    "missing expert": (_without(EXPERT), ["1 tensor missing", EXPERT]),
    "unexpected": (
        _with("model.layers.3.mlp.gate.weight", np.zeros((4, 16), np.float32)),
        ["1 tensor unexpected", f"model.layers.3.mlp.gate.weight [4, 16] in {SINGLE}"],
    ),
    "transposed": (
        lambda tensors: tensors.update({EXPERT: np.ascontiguousarray(tensors[EXPERT].T)}),
        ["1 tensor misshapen", f"{EXPERT} in {SINGLE} is [16, 8], expected [8, 16]"],
    ),
    "one dimension more": (lambda tensors: tensors.update({Q: tensors[Q][None]}), ["misshapen", "[1, 16, 16]"]),
    "integers": (_with(Q, np.zeros((16, 16), np.int8)), ["dtype", f"{Q} in {SINGLE} is I8", "BF16, F16, F32"]),
    "double": (_with(Q, np.zeros((16, 16), np.float64)), ["dtype", f"{Q} in {SINGLE} is F64"]),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_misfit_names_tensor_file_and_shapes(tmp_path, single, what):
    change, words = MISFITS[what]
    message = _verify_changed(single, tmp_path, change)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_many_misfits_are_counted_and_only_some_are_listed(tmp_path, single):
    experts = [f"model.layers.0.mlp.experts.{i}.{part}_proj.weight" for i in range(4) for part in ("gate", "up")]
    message = _verify_changed(single, tmp_path, _without(*experts, Q))
    assert "9 tensors missing" in message and "..." in message
    assert len(message) < 600


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_other_floating_types_pass(tmp_path, single, dtype):
    assert not _verify_changed(single, tmp_path, lambda tensors: tensors.update({Q: tensors[Q].astype(dtype)}))


def test_tensors_that_follow_from_the_config_are_passed_over(tmp_path, single):
    buffer = _with("model.layers.0.self_attn.rotary_emb.inv_freq", np.zeros(2, np.float32))
    assert not _verify_changed(single, tmp_path, buffer)


def test_a_stored_head_is_passed_over_only_where_it_is_tied(tmp_path, config):
    tied = write_checkpoint(tmp_path / "tied", replace(config, tie_word_embeddings=True), dtype="float32")
    head = np.zeros((config.vocab_size, config.hidden_size), np.float32)
    assert not _verify_changed(tied, tmp_path, _with("lm_head.weight", head))
    assert "unexpected" in _verify_changed(tied, tmp_path / "again", _with("lm_head.bias", head))


def test_an_untied_checkpoint_must_hold_its_head(tmp_path, single):
    assert "lm_head.weight" in _verify_changed(single, tmp_path, _without("lm_head.weight"))
