"""A GGUF file holds every number of a checkpoint, where llama.cpp looks for it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.peers.agreement import model_of, num_equal
from benchmarks.peers.gguf_layout import tensors_of, widened
from benchmarks.peers.gguf_sizes import sizes_of
from rayserve_moe.checkpoints.synthetic import write_checkpoint

FAMILIES = ["tiny", "olmoe-tiny", "deepseek-v3-tiny", "gpt-oss-tiny", "gemma-4-tiny", "mimo-v2-flash-tiny"]
CONSTANT = "rope_freqs.weight"
"""Of a file, not of a checkpoint: which pairs turn."""


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
    held.pop(CONSTANT, None)
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


def test_gemma_has_the_norms_and_factors_of_its_two_branches(tmp_path):
    theirs, held, _ = named("gemma-4-tiny", tmp_path)
    layer = {name.removeprefix("model.layers.2."): array for name, array in theirs.items()}
    for ours, its in {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
        "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
        "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_down_exps.weight": "experts.down_proj",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    }.items():
        np.testing.assert_array_equal(held[f"blk.2.{ours}"], layer[its])
    assert "blk.2.attn_v.weight" in held and "blk.3.attn_v.weight" not in held, "keys are values without a window"
    assert "output.weight" not in held, "the table of tokens is the head"


def test_pairs_that_do_not_turn_have_endless_periods(tmp_path):
    _, held, config = named("gemma-4-tiny", tmp_path)
    divisors, num_pairs = held[CONSTANT], config["global_head_dim"] // 2
    assert divisors.shape == (num_pairs,) and (divisors[: num_pairs // 4] == 1).all()
    angles = config["max_position_embeddings"] / divisors[num_pairs // 4 :]
    assert (np.cos(angles) == 1).all() and (np.sin(angles) < 1e-20).all()


def test_sinks_are_held_in_the_layers_that_have_them(tmp_path):
    theirs, held, config = named("mimo-v2-flash-tiny", tmp_path)
    windowed = [layer for layer, flag in enumerate(config["hybrid_layer_pattern"]) if flag]
    assert windowed == [1, 2]
    assert [int(name.split(".")[1]) for name in held if name.endswith("attn_sinks.weight")] == windowed
    sinks = theirs["model.layers.1.self_attn.attention_sink_bias"]
    np.testing.assert_array_equal(held["blk.1.attn_sinks.weight"], sinks)
    assert "blk.0.ffn_up.weight" in held and "blk.1.ffn_up_exps.weight" in held, "the first layer is dense"


def test_every_number_of_a_hybrid_model_is_held(tmp_path):
    theirs, held, _ = named("qwen3.5-tiny", tmp_path)
    assert sum(array.size for array in held.values()) == sum(array.size for array in theirs.values())
    for name in ("ssm_conv1d.weight", "ffn_gate_inp_shexp.weight", "ssm_a", "ssm_dt.bias", "attn_norm.weight"):
        assert held[f"blk.0.{name}"].dtype == np.float32
    assert held["blk.0.ffn_gate_inp_shexp.weight"].ndim == 1
    assert "blk.3.post_attention_norm.weight" in held


@pytest.mark.parametrize(
    ("size", "prefix"), [("nemotron-3-tiny", "backbone.layers.0.mixer."), ("granite-4-tiny", "model.layers.0.mamba.")]
)
def test_every_number_of_mamba_layers_is_held(size, prefix, tmp_path):
    theirs, held, config = named(size, tmp_path)
    assert sum(array.size for array in held.values()) == sum(array.size for array in theirs.values())
    groups = sizes_of(config)["ssm.group_count"]
    expected = {
        "ssm_in.weight": theirs[f"{prefix}in_proj.weight"],
        "ssm_a": -np.exp(theirs[f"{prefix}A_log"])[:, None],
        "ssm_d": theirs[f"{prefix}D"][:, None],
        "ssm_dt.bias": theirs[f"{prefix}dt_bias"],
        "ssm_conv1d.weight": theirs[f"{prefix}conv1d.weight"][:, 0],
        "ssm_conv1d.bias": theirs[f"{prefix}conv1d.bias"],
        "ssm_norm.weight": theirs[f"{prefix}norm.weight"].reshape(groups, -1),
        "ssm_out.weight": theirs[f"{prefix}out_proj.weight"],
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(held[f"blk.0.{name}"], array)


@pytest.mark.parametrize(
    ("size", "prefix", "sign"),
    [("kimi-linear-tiny", "model.layers.{}.self_attn.", -1), ("ling-3-tiny", "model.layers.{}.attention.", 1)],
)
def test_every_number_of_kimi_delta_layers_is_held(size, prefix, sign, tmp_path):
    theirs, held, config = named(size, tmp_path)
    assert sum(array.size for array in held.values()) == sum(array.size for array in theirs.values())
    sizes, layer = sizes_of(config), prefix.format(1)
    assert sizes["attention.head_count_kv"] == [0, 0, 0, 1]
    assert (sizes["kda.head_dim"], sizes["ssm.conv_kernel"], sizes["leading_dense_block_count"]) == (32, 4, 1)
    expected = {
        "attn_q.weight": theirs[f"{layer}q_proj.weight"],
        "ssm_beta.weight": theirs[f"{layer}b_proj.weight"],
        "ssm_a": sign * np.exp(theirs[f"{layer}A_log"]).reshape(4, 1),
        "ssm_dt.bias": theirs[f"{layer}dt_bias"],
        "ssm_conv1d_k.weight": theirs[f"{layer}k_conv1d.weight"],
        "ssm_norm.weight": theirs[f"{layer}o_norm.weight"],
        "attn_output.weight": theirs[f"{layer}o_proj.weight"],
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(held[f"blk.1.{name}"], array)
    kv_b = theirs[f"{prefix.format(3)}kv_b_proj.weight"].reshape(4, 64, 32)
    np.testing.assert_array_equal(held["blk.3.attn_v_b.weight"], kv_b[:, 32:])


def test_gates_and_decays_of_kimi_delta_layers_have_names_of_their_own(tmp_path):
    theirs, held, _ = named("kimi-linear-tiny", tmp_path / "kimi")
    for ours, its in (("f_a", "f_a_proj"), ("f_b", "f_b_proj"), ("g_a", "g_a_proj"), ("g_b", "g_b_proj")):
        np.testing.assert_array_equal(
            held[f"blk.2.ssm_{ours}.weight"], theirs[f"model.layers.2.self_attn.{its}.weight"]
        )
    for ours, its in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        np.testing.assert_array_equal(
            held[f"blk.2.ffn_{ours}_exps.weight"][7], theirs[f"model.layers.2.block_sparse_moe.experts.7.{its}.weight"]
        )
    theirs, held, config = named("ling-3-tiny", tmp_path / "ling")
    for layer, ours in ((2, "ssm_g_a"), (3, "attn_gate")):
        np.testing.assert_array_equal(
            held[f"blk.{layer}.{ours}.weight"], theirs[f"model.layers.{layer}.attention.g_proj.weight"]
        )
    np.testing.assert_array_equal(held["blk.2.ssm_f_a.weight"], theirs["model.layers.2.attention.f_proj.weight"])
    np.testing.assert_array_equal(held["blk.3.attn_output.weight"], theirs["model.layers.3.attention.dense.weight"])
    sizes = sizes_of(config)
    assert (sizes["kda.safe_gate"], sizes["kda.gate_lower_bound"], sizes["expert_group_count"]) == (True, -5.0, 4)


def test_layers_of_one_part_have_a_norm_and_their_kind_by_sizes(tmp_path):
    _, held, config = named("nemotron-3-tiny", tmp_path)
    sizes, pattern = sizes_of(config), config["hybrid_override_pattern"]
    assert [layer for layer, heads in enumerate(sizes["attention.head_count_kv"]) if heads] == [pattern.index("*")]
    assert sizes["attention.layer_norm_epsilon"] == config["layer_norm_epsilon"], "llama.cpp requires both epsilons"
    assert "".join("E" if width else "M" for width in sizes["feed_forward_length"]).replace("E", "") == "MMMM"
    for layer, letter in enumerate(pattern):
        own = {"M": "ssm_in.weight", "*": "attn_k.weight", "E": "ffn_up_exps.weight"}[letter]
        assert f"blk.{layer}.{own}" in held and f"blk.{layer}.attn_norm.weight" in held


def test_halves_of_gate_and_up_are_parted(tmp_path):
    theirs, held, _ = named("granite-4-tiny", tmp_path)
    for own, kind in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp")):
        fused = theirs[f"model.layers.1.{own}.input_linear.weight"]
        gate, up = (held[f"blk.1.ffn_{part}_{kind}.weight"] for part in ("gate", "up"))
        np.testing.assert_array_equal(np.concatenate([gate, up], axis=-2), fused)


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


def test_heads_windows_and_rotations_go_by_layer():
    gemma = sizes_of(model_of("gemma-4-small").hf_config("bfloat16"))
    assert gemma["attention.sliding_window_pattern"] == ([True] * 5 + [False]) * 2
    assert gemma["attention.head_count_kv"] == ([2] * 5 + [1]) * 2
    assert (gemma["attention.key_length"], gemma["attention.key_length_swa"]) == (512, 256)
    assert (gemma["rope.freq_base"], gemma["rope.freq_base_swa"], gemma["rope.dimension_count"]) == (1e6, 1e4, 512)
    assert (gemma["expert_used_count"], gemma["feed_forward_length"], gemma["expert_feed_forward_length"]) == (
        4,
        384,
        128,
    )
    mimo = sizes_of(model_of("mimo-v2-flash-small").hf_config("bfloat16"))
    assert mimo["attention.head_count_kv"] == [1, 2, 2, 2, 2, 1, 2, 2]
    assert mimo["attention.sliding_window_pattern"] == [heads == 2 for heads in mimo["attention.head_count_kv"]]
    assert (mimo["attention.key_length"], mimo["attention.value_length"], mimo["rope.dimension_count"]) == (
        192,
        128,
        64,
    )
    assert (mimo["rope.freq_base"], mimo["rope.freq_base_swa"]) == (5e6, 1e4)
    assert (mimo["attention.value_scale"], mimo["attention.layer_norm_rms_epsilon"]) == (0.707, 1e-5)


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
