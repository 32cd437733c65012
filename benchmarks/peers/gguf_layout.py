"""What llama.cpp calls the sizes and the tensors of a checkpoint, and how it holds them; numpy alone."""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

QWEN3_5, GEMMA_4 = "qwen3_5_moe_text", "gemma4_text"
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    QWEN3_5: "qwen35moe",
    GEMMA_4: "gemma4",
    "mimo_v2_flash": "mimo2",
}
"""By `model_type`."""

_MLP = {f"{part}_proj.weight": f"ffn_{part}{{kind}}.weight" for part in ("gate", "up", "down")}
TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{part}_proj.{kind}": f"attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"self_attn.o_proj.{kind}": f"attn_output.{kind}" for kind in ("weight", "bias")},
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    **{f"mlp.{theirs}": ours.format(kind="") for theirs, ours in _MLP.items()},
    **{f"mlp.shared_experts.{theirs}": ours.format(kind="_shexp") for theirs, ours in _MLP.items()},
    **{f"mlp.shared_expert.{theirs}": ours.format(kind="_shexp") for theirs, ours in _MLP.items()},
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    **{f"mlp.experts.*.{theirs}": ours.format(kind="_exps") for theirs, ours in _MLP.items()},
}
"""Tensors that are held as files hold them, and the experts of a layer, one upon the other."""
_NORM_AFTER_ATTENTION = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
OTHER_TENSORS = {
    "gpt-oss": _NORM_AFTER_ATTENTION,
    "qwen35moe": _NORM_AFTER_ATTENTION,
    "gemma4": {
        **_NORM_AFTER_ATTENTION,
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
        "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
        "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
        "layer_scalar": "layer_output_scale.weight",
        "router.proj.weight": "ffn_gate_inp.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    },
}
"""Further names of tensors, and other ones, by architecture."""
OTHER_KEYS = {"rms_norm_eps": "layernorm_epsilon", "num_experts_per_tok": "top_k_experts"}
"""Keys that a family has in place of others."""
NEVER_TURNS = 1e30
"""Divisor of the frequency of a pair that does not turn."""
ALWAYS_WIDE = ("ffn_gate_inp.weight", ".bias", "ssm_conv1d.weight")
"""Float32 in every file, as are vectors."""

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*?)(?:(?<=experts\.)(\d+)(\..*))?$")


def sizes_of(config: dict[str, Any]) -> dict[str, int | float | bool | str | list[int]]:
    """Return sizes under llama.cpp's names, without the prefix of the architecture. KeyError for other families."""
    config = {key: config[other] for key, other in OTHER_KEYS.items() if other in config} | config
    rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope |= rope.get("full_attention", {})
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        **({"feed_forward_length": config["intermediate_size"]} if "intermediate_size" in config else {}),
        "block_count": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
        "expert_used_count": config["num_experts_per_tok"],
        **_FAMILY_SIZES[config["model_type"]](config),
        **(_yarn_sizes(rope) if rope.get("rope_type") == "yarn" else {}),
    }


def _olmoe_sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {"expert_count": config["num_experts"]}


def _qwen3_moe_sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "expert_count": config["num_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


def _qwen3_5_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes with sections, which tell positions in pictures apart; text has the same position in all."""
    rotated = config["rope_parameters"]["partial_rotary_factor"]
    return {
        **_qwen3_moe_sizes(config),
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "rope.dimension_count": int(config["head_dim"] * rotated),
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": config["full_attention_interval"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
    }


def _gpt_oss_sizes(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "expert_count": config["num_local_experts"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _deepseek_v3_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes with one KV head, the latent with the rotated key; `_mla` are the sizes of a head."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[config["scoring_func"]],
    }


def _gemma_4_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes where all pairs of full heads turn: `tensors_of` divides the frequencies of the others."""
    are_windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads, full = config["head_dim"], config["global_head_dim"]
    kv_heads = config["num_global_key_value_heads"], config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [kv_heads[is_windowed] for is_windowed in are_windowed],
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": heads,
        "attention.value_length_swa": heads,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": are_windowed,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "expert_count": config["num_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.dimension_count": full,
        "rope.dimension_count_swa": heads,
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


def _mimo_sizes(config: dict[str, Any]) -> dict[str, Any]:
    are_windowed = [bool(flag) for flag in config["hybrid_layer_pattern"]]
    kv_heads = config["num_key_value_heads"], config["swa_num_key_value_heads"]
    return {
        "attention.head_count_kv": [kv_heads[is_windowed] for is_windowed in are_windowed],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": are_windowed,
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
        "rope.freq_base_swa": config["swa_rope_theta"],
    }


_FAMILY_SIZES = {
    "qwen3_moe": _qwen3_moe_sizes,
    "olmoe": _olmoe_sizes,
    "deepseek_v3": _deepseek_v3_sizes,
    "gpt_oss": _gpt_oss_sizes,
    QWEN3_5: _qwen3_5_sizes,
    GEMMA_4: _gemma_4_sizes,
    "mimo_v2_flash": _mimo_sizes,
}


def _yarn_sizes(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of YaRN; llama.cpp always rounds the ends of the ramp to whole dimensions."""
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def tensors_of(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Return every tensor with its name: uint16 holds the bits of bfloat16. KeyError for a name that no table has."""
    names, experts = TENSORS | OTHER_TENSORS.get(ARCHITECTURES[config["model_type"]], {}), defaultdict(dict)
    if config["model_type"] == GEMMA_4:
        yield "rope_freqs.weight", _frequency_divisors(config)
    for name, read in _read_all(model).items():
        array = _full_scale(name, read) if config["model_type"] == QWEN3_5 else read
        if not (found := _IN_LAYER.match(name)):
            yield names[name], widened(array) if array.ndim == 1 else array
            continue
        layer, part, expert, rest = found.groups()
        if expert:
            experts[f"blk.{layer}.{names[f'{part}*{rest}']}"][int(expert)] = array
            continue
        for ours, held in _held(part, array, config, names):
            is_wide = held.ndim == 1 or ours.endswith(ALWAYS_WIDE)
            yield f"blk.{layer}.{ours}", widened(held) if is_wide else np.ascontiguousarray(held)
    for name, arrays in experts.items():
        yield name, np.stack([arrays[expert] for expert in range(len(arrays))])


def _frequency_divisors(config: dict[str, Any]) -> np.ndarray:
    """Return divisors of the frequencies of full layers, float32 [pairs of a head]; only the first pairs turn."""
    head, rope = config["global_head_dim"], config["rope_parameters"]["full_attention"]
    divisors = np.full(head // 2, NEVER_TURNS, np.float32)
    divisors[: int(rope["partial_rotary_factor"] * head // 2)] = 1
    return divisors


def _held(part: str, array: np.ndarray, config: dict[str, Any], names: dict[str, str]) -> list[tuple[str, np.ndarray]]:
    """Return llama.cpp's form of a tensor of a layer."""
    if part == "self_attn.kv_b_proj.weight":
        of_heads = array.reshape(config["num_attention_heads"], -1, array.shape[-1])
        keys, values = np.split(of_heads, [config["qk_nope_head_dim"]], axis=1)
        return [("attn_k_b.weight", keys.swapaxes(1, 2)), ("attn_v_b.weight", values)]
    if part == "mlp.experts.down_proj":
        return [("ffn_down_exps.weight", array.swapaxes(1, 2))]
    if part.startswith("mlp.experts.gate_up_proj"):
        is_bias = part.endswith("_bias")
        kind, rows = "bias" if is_bias else "weight", array if is_bias else array.swapaxes(1, 2)
        return [(f"ffn_{name}_exps.{kind}", rows[:, start::2]) for start, name in enumerate(("gate", "up"))]
    if part.startswith("linear_attn."):
        return [(names[part], _delta_held(part.removeprefix("linear_attn."), array, config))]
    if part == "mlp.shared_expert_gate.weight":
        return [(names[part], array.ravel())]
    return [(names[part], array)]


def _full_scale(name: str, array: np.ndarray) -> np.ndarray:
    """Return scales of norms as they multiply: files hold them without 1, except the norm of gated delta layers."""
    is_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return np.float32(1) + widened(array) if is_offset else array


def _delta_held(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a tensor of a gated delta layer: value heads by turns of key heads, rates of decay as they multiply.

    The files hold the value heads of a key head together; here value head i belongs to key head i modulo their number.
    """
    num_heads, num_key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    order = np.arange(num_heads).reshape(num_key_heads, -1).T.ravel()

    def by_turns(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(num_heads, -1, *rows.shape[1:])[order].reshape(rows.shape)

    if name == "norm.weight":
        return array
    if name == "A_log":
        return -np.exp(widened(by_turns(array)))
    if name == "out_proj.weight":
        return by_turns(array.T).T
    if name.startswith(("in_proj_qkv.", "conv1d.")):
        queries_and_keys, values = np.split(
            array.reshape(len(array), -1), [2 * num_key_heads * config["linear_key_head_dim"]]
        )
        return np.concatenate([queries_and_keys, by_turns(values)])
    return by_turns(array)


def widened(array: np.ndarray) -> np.ndarray:
    """Convert exactly to float32."""
    return array if array.dtype == np.float32 else (array.astype(np.uint32) << 16).view(np.float32)


def _read_all(model: Path) -> dict[str, np.ndarray]:
    """Return every tensor, mapped from the safetensors files: float32, or bits of bfloat16 as uint16."""
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        raw = np.memmap(file, np.uint8, "r", offset=8 + length)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = {"BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
            tensors[name] = raw[begin:end].view(dtype).reshape(entry["shape"])
    return tensors
