"""Synthetic checkpoints: the same recipe gives the same bytes, transformers can read them, nothing foreign is lost."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.names import verify
from rayserve_moe.checkpoints.synthetic import (
    FAMILY_PRESETS,
    MARKER_FILE,
    PRESETS,
    DenseLayers,
    Drawn,
    SyntheticModel,
    ensure_checkpoint,
    write_checkpoint,
)
from rayserve_moe.model.draft_spec import draft_parameters, prediction_spec
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import FAMILIES, prediction_rules_of, spec_from_config
from rayserve_moe.model.parameters import parameter_specs
from tests.support.checkpoints.fused_experts import FUSED_RULES, LAYOUTS, fused_family

NUM_PARAMETERS = {
    "tiny": 1.9e6, "small": 114e6, "mid": 972e6,
    "olmoe-tiny": 1.98e6, "olmoe-small": 117e6, "olmoe-mid": 990e6,
    "deepseek-v3-tiny": 1.7e6, "deepseek-v3-small": 113e6, "deepseek-v3-mid": 1.01e9,
    "qwen3.5-tiny": 2.08e6, "qwen3.5-small": 122e6, "qwen3.5-mid": 1013e6,
    "gpt-oss-tiny": 1.93e6, "gpt-oss-small": 115e6, "gpt-oss-mid": 970e6,
    "gemma-4-tiny": 2.02e6, "gemma-4-small": 107e6, "gemma-4-mid": 1033e6,
    "mimo-v2-flash-tiny": 1.64e6, "mimo-v2-flash-small": 113e6, "mimo-v2-flash-mid": 954e6,
    "nemotron-3-tiny": 1.82e6, "nemotron-3-small": 118e6, "nemotron-3-mid": 982e6,
    "granite-4-tiny": 2.12e6, "granite-4-small": 106e6, "granite-4-mid": 962e6,
    "kimi-linear-tiny": 1.8e6, "kimi-linear-small": 111e6, "kimi-linear-mid": 939e6,
    "ling-3-tiny": 1.85e6, "ling-3-small": 114e6, "ling-3-mid": 955e6,
}  # fmt: skip


def _contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_same_recipe_gives_the_same_bytes_anywhere(tmp_path, config):
    first, second = (write_checkpoint(tmp_path / name, config, seed=3) for name in ("a", "b"))
    assert _contents(first) == _contents(second)


def test_the_bytes_of_a_preset_are_the_same_for_ever(tmp_path):
    """But for the tokenizer's, which the library writes that reads it."""
    path = ensure_checkpoint(tmp_path / "tiny", "tiny")
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json", "model.safetensors", MARKER_FILE):
        digest.update((path / name).read_bytes())
    assert digest.hexdigest() == "1566d31a8b7646c8b9705709dac3da58a18b1961bae41f44cb0e9196ece083f4"


def test_a_model_of_any_family_is_drawn_as_its_config_describes_it(tmp_path, config):
    """Given as data, Qwen3-MoE has the weights that its own class has."""
    own = write_checkpoint(tmp_path / "own", config, seed=3, dtype="float32")
    stated = SyntheticModel(config.hf_config("float32"), config.drawn)
    given = write_checkpoint(tmp_path / "given", stated, seed=3, dtype="float32")
    assert _contents(own)["model.safetensors"] == _contents(given)["model.safetensors"]
    assert json.loads((own / "config.json").read_text()) == json.loads((given / "config.json").read_text())
    assert write_checkpoint(given, stated, seed=3, dtype="float32") == given


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_of_several_parameters_is_written_once(tmp_path, config, monkeypatch, layout):
    monkeypatch.setitem(FAMILIES, layout, fused_family(layout))
    model = SyntheticModel(config.hf_config("bfloat16") | {"architectures": [layout]})
    files = open_checkpoint(write_checkpoint(tmp_path / "model", model))
    tree = parameter_specs(spec_from_config(files.config), dtype="float32")
    verify(files, tree, rules=FUSED_RULES)
    both = files.read("model.layers.0.mlp.experts.gate_up_proj").astype(np.float32)
    assert both.shape == ((4, 16, 16)) and both.std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("preset", "key", "fc", "norm"),
    [
        ("qwen3.5-tiny", "mtp_num_hidden_layers", "mtp.fc.weight", "mtp.norm.weight"),
        (
            "deepseek-v3-tiny",
            "num_nextn_predict_layers",
            "model.layers.4.eh_proj.weight",
            "model.layers.4.shared_head.norm.weight",
        ),
    ],
)
def test_a_prediction_layer_is_written_where_the_config_counts_one(tmp_path, preset, key, fc, norm):
    plain = FAMILY_PRESETS[preset]
    predicting = SyntheticModel(dict(plain.config) | {key: 1}, plain.drawn)
    without, files = (
        open_checkpoint(write_checkpoint(tmp_path / name, model, dtype="float32"))
        for name, model in (("without", plain), ("with", predicting))
    )
    own = files.tensors.keys() - without.tensors.keys()
    assert {fc, norm} <= own and {name.split(".")[0] for name in own} == {fc.split(".")[0]}
    assert files.read(fc).shape == (128, 256) and files.read(fc).std() == pytest.approx(0.02, rel=0.05)
    layer = draft_parameters(prediction_spec(spec_from_config(files.config)), dtype="float32")
    verify(files, layer, rules=prediction_rules_of(files.config), ignored=("*",))
    for name in without.tensors:
        np.testing.assert_array_equal(files.read(name), without.read(name))


@pytest.mark.parametrize("change", [{"seed": 4}, {"dtype": "float32"}])
def test_another_recipe_replaces_the_checkpoint(tmp_path, config, change):
    before = _contents(write_checkpoint(tmp_path / "model", config, seed=3))
    after = _contents(write_checkpoint(tmp_path / "model", config, **({"seed": 3} | change)))
    assert before["model.safetensors"] != after["model.safetensors"]


def test_weights_do_not_depend_on_how_they_are_cut_into_files(tmp_path, config):
    one = open_checkpoint(write_checkpoint(tmp_path / "one", config))
    several = open_checkpoint(write_checkpoint(tmp_path / "several", config, max_shard_bytes=4_000))
    for name in one.tensors:
        np.testing.assert_array_equal(one.read(name), several.read(name))
    entries = several.tensors.values()
    for file in {entry.file for entry in entries}:
        sizes = [entry.end - entry.begin for entry in entries if entry.file == file]
        assert sum(sizes) <= 4_000 or len(sizes) == 1
    assert len({entry.file for entry in entries}) > 5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dense": DenseLayers()},
        {"dense": DenseLayers(decoder_sparse_step=2)},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 6, "num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ],
)
def test_any_shape_fits_its_own_config(tmp_path, config, changes):
    files = open_checkpoint(write_checkpoint(tmp_path / "model", replace(config, **changes)))
    spec = spec_from_config(files.config)
    verify(files, parameter_specs(spec, dtype="bfloat16"), rules=CHECKPOINT_RULES)
    assert spec.tie_embeddings == ("lm_head.weight" not in files.tensors)
    assert spec.checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize("name", PRESETS | FAMILY_PRESETS)
def test_presets_have_the_stated_number_of_parameters(name):
    config = (PRESETS | FAMILY_PRESETS)[name].hf_config("float32")
    tree = parameter_specs(spec_from_config(config), dtype="float32")
    total = sum(np.prod(spec.shape) for group in tree.values() for spec in group.values())
    assert total == pytest.approx(NUM_PARAMETERS[name], rel=0.02)


def test_weights_are_normal_and_norms_near_one(tmp_path, config):
    files = open_checkpoint(write_checkpoint(tmp_path / "model", replace(config, drawn=Drawn(scale=0.5))))
    table = files.read("model.embed_tokens.weight").astype(np.float32)
    assert abs(table.mean()) < 0.05 and table.std() == pytest.approx(0.5, rel=0.05)
    assert (files.read("model.norm.weight") == 1).all()


def test_transformers_reads_config_and_tokenizer(tmp_path, config):
    path = write_checkpoint(tmp_path / "model", config)
    read = AutoConfig.from_pretrained(path)
    assert (read.model_type, read.num_experts, read.head_dim) == ("qwen3_moe", config.num_experts, config.head_dim)
    assert read.rope_parameters["rope_theta"] == config.constants.rope_theta
    assert list(read.mlp_only_layers) == list(config.dense.mlp_only_layers)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def test_a_second_call_does_not_write(tmp_path, config):
    path = write_checkpoint(tmp_path / "model", config)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    write_checkpoint(tmp_path / "model", config)
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before


def test_what_an_interrupted_call_left_is_replaced(tmp_path, config):
    partial = tmp_path / ".model.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_text("half")
    path = write_checkpoint(tmp_path / "model", config)
    assert not partial.exists()
    assert _contents(path) == _contents(write_checkpoint(tmp_path / "other", config))


def test_a_failing_call_leaves_no_checkpoint(tmp_path, config):
    with pytest.raises(ValueError, match="num_experts"):
        write_checkpoint(tmp_path / "model", replace(config, num_experts=0))
    assert not (tmp_path / "model").exists()


def test_a_directory_of_someone_else_is_never_overwritten(tmp_path, config):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.txt").write_text("only copy")
    with pytest.raises(CheckpointError, match="is not overwritten"):
        write_checkpoint(tmp_path / "model", config)
    assert (tmp_path / "model" / "thesis.txt").read_text() == "only copy"


def test_several_writers_at_once_leave_one_whole_checkpoint(tmp_path, config):
    failures: list[Exception] = []

    def write() -> None:
        try:
            open_checkpoint(write_checkpoint(tmp_path / "model", config))
        except ValueError as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert json.loads((tmp_path / "model" / MARKER_FILE).read_text())["seed"] == 0


def test_presets_are_made_by_name(tmp_path):
    files = open_checkpoint(ensure_checkpoint(tmp_path / "cache" / "tiny", "tiny", seed=1, dtype="float32"))
    assert files.config["num_experts"] == PRESETS["tiny"].num_experts
    assert files.tensors["model.norm.weight"].dtype == "F32"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"dtype": "float16"}, "bfloat16 or float32"), ({"max_shard_bytes": 0}, "max_shard_bytes must be positive")],
)
def test_options_out_of_range_are_refused(tmp_path, config, options, words):
    with pytest.raises(CheckpointError, match=words):
        write_checkpoint(tmp_path / "model", config, **options)


def test_a_vocabulary_below_the_bytes_and_an_unknown_preset_are_refused(tmp_path, config):
    with pytest.raises(CheckpointError, match="vocab_size 200"):
        write_checkpoint(tmp_path / "model", replace(config, vocab_size=200))
    with pytest.raises(CheckpointError, match="tiny, small, mid"):
        ensure_checkpoint(tmp_path / "model", "huge")
