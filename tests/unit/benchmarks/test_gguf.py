"""A GGUF file holds every number of a checkpoint, where llama.cpp looks for it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.peers.agreement import model_of, num_equal
from benchmarks.peers.gguf_layout import sizes_of, tensors_of, widened
from rayserve_moe.checkpoints.synthetic import write_checkpoint

FAMILIES = ["tiny", "olmoe-tiny", "deepseek-v3-tiny", "gpt-oss-tiny"]


@pytest.fixture(params=FAMILIES)
def checkpoint(request, tmp_path):
    path = write_checkpoint(tmp_path / "model", model_of(request.param))
    return path, json.loads((path / "config.json").read_text())


def sorted_numbers(arrays) -> np.ndarray:
    return np.sort(np.concatenate([np.asarray(array, np.float32).ravel() for array in arrays]))


def test_every_number_of_a_checkpoint_is_held_once(checkpoint):
    path, config = checkpoint
    held = dict(tensors_of(path, config))
    assert len(held) == len(list(tensors_of(path, config))), "no name twice"
    expected = sorted_numbers(load_file(path / "model.safetensors").values())
    np.testing.assert_array_equal(sorted_numbers(map(widened, held.values())), expected)


def test_vectors_biases_and_routers_are_wide_and_nothing_else(checkpoint):
    for name, array in tensors_of(*checkpoint):
        is_wide = array.ndim == 1 or name.endswith(("ffn_gate_inp.weight", ".bias"))
        assert array.dtype == (np.float32 if is_wide else np.uint16), name


def named(size: str, directory) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict]:
    """The checkpoint's tensors, and those of the GGUF file, in float32."""
    path = write_checkpoint(directory, model_of(size), dtype="float32")
    config = json.loads((path / "config.json").read_text())
    return load_file(path / "model.safetensors"), dict(tensors_of(path, config)), config


def test_experts_lie_upon_each_other_in_their_order(tmp_path):
    theirs, held, _ = named("olmoe-tiny", tmp_path)
    for expert in (0, 2, 10, 15):
        np.testing.assert_array_equal(
            held["blk.3.ffn_up_exps.weight"][expert], theirs[f"model.layers.3.mlp.experts.{expert}.up_proj.weight"]
        )


def test_latent_keys_and_values_are_held_apart_by_heads(tmp_path):
    theirs, held, config = named("deepseek-v3-tiny", tmp_path)
    kv_b = theirs["model.layers.2.self_attn.kv_b_proj.weight"]
    keys, values = held["blk.2.attn_k_b.weight"], held["blk.2.attn_v_b.weight"]
    head_rows = config["qk_nope_head_dim"] + config["v_head_dim"]
    for head in range(config["num_attention_heads"]):
        of_head = kv_b[head * head_rows : (head + 1) * head_rows]
        np.testing.assert_array_equal(keys[head], of_head[: config["qk_nope_head_dim"]].T)
        np.testing.assert_array_equal(values[head], of_head[config["qk_nope_head_dim"] :])


def test_gate_and_up_in_turns_are_held_apart(tmp_path):
    theirs, held, _ = named("gpt-oss-tiny", tmp_path)
    both, bias = (theirs[f"model.layers.1.mlp.experts.gate_up_proj{end}"] for end in ("", "_bias"))
    for start, name in enumerate(("gate", "up")):
        np.testing.assert_array_equal(held[f"blk.1.ffn_{name}_exps.weight"][5], both[5, :, start::2].T)
        np.testing.assert_array_equal(held[f"blk.1.ffn_{name}_exps.bias"][5], bias[5, start::2])
    assert "blk.1.post_attention_norm.weight" in held


def test_every_number_of_a_hybrid_model_is_held(tmp_path):
    theirs, held, _ = named("qwen3.5-tiny", tmp_path)
    assert sum(array.size for array in held.values()) == sum(array.size for array in theirs.values())
    for name in ("ssm_conv1d.weight", "ffn_gate_inp_shexp.weight", "ssm_a", "ssm_dt.bias", "attn_norm.weight"):
        assert held[f"blk.0.{name}"].dtype == np.float32
    assert held["blk.0.ffn_gate_inp_shexp.weight"].ndim == 1
    assert "blk.3.post_attention_norm.weight" in held


def test_value_heads_lie_by_turns_of_key_heads(tmp_path):
    theirs, held, config = named("qwen3.5-tiny", tmp_path)
    num_heads, num_key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    width, num_keys = config["linear_value_head_dim"], 2 * num_key_heads * config["linear_key_head_dim"]
    layer = {name.removeprefix("model.layers.1.linear_attn."): array for name, array in theirs.items()}
    for head in range(num_heads):
        place = head % 2 * num_key_heads + head // 2  # two value heads for each key head
        ours, its = slice(place * width, (place + 1) * width), slice(head * width, (head + 1) * width)
        equal = np.testing.assert_array_equal
        equal(held["blk.1.ssm_dt.bias"][place], layer["dt_bias"][head])
        equal(held["blk.1.ssm_a"][place], -np.exp(layer["A_log"][head]))
        equal(held["blk.1.ssm_alpha.weight"][place], layer["in_proj_a.weight"][head])
        equal(held["blk.1.ssm_beta.weight"][place], layer["in_proj_b.weight"][head])
        equal(held["blk.1.attn_gate.weight"][ours], layer["in_proj_z.weight"][its])
        equal(held["blk.1.ssm_out.weight"][:, ours], layer["out_proj.weight"][:, its])
        equal(held["blk.1.attn_qkv.weight"][num_keys:][ours], layer["in_proj_qkv.weight"][num_keys:][its])
        equal(held["blk.1.ssm_conv1d.weight"][num_keys:][ours], layer["conv1d.weight"][num_keys:, 0][its])
    equal(held["blk.1.attn_qkv.weight"][:num_keys], layer["in_proj_qkv.weight"][:num_keys])


def test_norms_of_a_hybrid_model_are_held_as_they_multiply(tmp_path):
    theirs, held, _ = named("qwen3.5-tiny", tmp_path)
    for ours, its in {
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.3.attn_q_norm": "model.layers.3.self_attn.q_norm",
    }.items():
        np.testing.assert_array_equal(held[f"{ours}.weight"], 1 + theirs[f"{its}.weight"])
    np.testing.assert_array_equal(held["blk.0.ssm_norm.weight"], theirs["model.layers.0.linear_attn.norm.weight"])


def test_sizes_go_by_the_names_of_their_family():
    latent = sizes_of(model_of("deepseek-v3-mid").hf_config("bfloat16"))
    assert (latent["attention.head_count_kv"], latent["attention.key_length"]) == (1, 512 + 64)
    assert (latent["expert_gating_func"], latent["expert_weights_norm"]) == (2, True)
    windowed = sizes_of(model_of("gpt-oss-mid").hf_config("bfloat16"))
    assert (windowed["attention.sliding_window"], windowed["rope.scaling.factor"]) == (128, 4.0)
    hybrid = sizes_of(model_of("qwen3.5-small").hf_config("bfloat16"))
    assert (hybrid["rope.dimension_count"], hybrid["ssm.inner_size"], hybrid["ssm.group_count"]) == (32, 512, 4)
    assert "feed_forward_length" not in hybrid
    plain = sizes_of(model_of("mid").hf_config("bfloat16"))
    assert plain["expert_feed_forward_length"] == 384
    assert not any("yarn" in name for name in plain)


def test_a_family_or_a_tensor_without_a_name_is_refused(tmp_path):
    model = model_of("olmoe-tiny")
    with pytest.raises(KeyError, match="mixtral"):
        sizes_of({**model.hf_config("bfloat16"), "model_type": "mixtral"})
    path = write_checkpoint(tmp_path, replace(model, config={**model.config, "attention_bias": True}))
    config = json.loads((path / "config.json").read_text())
    assert any(name.endswith("attn_q.bias") for name, _ in tensors_of(path, config))
    with pytest.raises(KeyError, match="kimi"):
        list(tensors_of(path, {**config, "model_type": "kimi"}))


def test_equal_tokens_are_counted_up_to_the_first_that_differs():
    assert num_equal([[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [4, 5, 6]]) == 1 + 3
