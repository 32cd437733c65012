"""Names and layouts of a checkpoint's tensors in GGUF files of llama.cpp. Needs numpy alone."""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

QWEN3_5, GEMMA_4, LING_3 = "qwen3_5_moe_text", "gemma4_text", "bailing_hybrid"
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    QWEN3_5: "qwen35moe",
    GEMMA_4: "gemma4",
    "mimo_v2_flash": "mimo2",
    "nemotron_h": "nemotron_h_moe",
    "granitemoehybrid": "granitehybrid",
    "kimi_linear": "kimi-linear",
    LING_3: "bailingmoe3",
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
_MAMBA = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
"""Tensors of Mamba-2, by the ends of their names."""
_KIMI_DELTA = {
    **{f"{part}_conv1d.weight": f"ssm_conv1d_{part}.weight" for part in "qkv"},
    "b_proj.weight": "ssm_beta.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "o_norm.weight": "ssm_norm.weight",
}
"""Tensors of Kimi delta layers but for projections, by the ends of their names."""
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
    "nemotron_h_moe": {
        "backbone.embeddings.weight": "token_embd.weight",
        "backbone.norm_f.weight": "output_norm.weight",
        "norm.weight": "attn_norm.weight",
        **{f"mixer.{theirs}": ours for theirs, ours in _MAMBA.items()},
        **{f"mixer.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
        "mixer.o_proj.weight": "attn_output.weight",
        "mixer.gate.weight": "ffn_gate_inp.weight",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        **{f"mixer.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("up", "down")},
        **{f"mixer.experts.*.{part}_proj.weight": f"ffn_{part}_exps.weight" for part in ("up", "down")},
    },
    "granitehybrid": {
        **{f"mamba.{theirs}": ours for theirs, ours in _MAMBA.items()},
        "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
        "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
        "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    },
    "kimi-linear": {
        **{f"self_attn.{theirs}": ours for theirs, ours in _KIMI_DELTA.items()},
        **{f"self_attn.{part}_{step}_proj.weight": f"ssm_{part}_{step}.weight" for part in "fg" for step in "ab"},
        "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
        "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
        **{f"block_sparse_moe.shared_experts.{theirs}": ours.format(kind="_shexp") for theirs, ours in _MLP.items()},
        "block_sparse_moe.experts.*.w1.weight": "ffn_gate_exps.weight",
        "block_sparse_moe.experts.*.w3.weight": "ffn_up_exps.weight",
        "block_sparse_moe.experts.*.w2.weight": "ffn_down_exps.weight",
    },
    "bailingmoe3": {
        **{name.replace("self_attn.", "attention."): ours for name, ours in TENSORS.items() if "self_attn." in name},
        **{f"attention.{theirs}": ours for theirs, ours in _KIMI_DELTA.items()},
        "model.word_embeddings.weight": "token_embd.weight",
        "attention.dense.weight": "attn_output.weight",
        "attention.f_proj.weight": "ssm_f_a.weight",
        "mlp.gate.expert_bias": "exp_probs_b.bias",
    },
}
"""Further names of tensors, and other ones, by architecture."""
NEVER_TURNS = 1e30
"""Divisor of the frequency of a pair that does not turn."""
ALWAYS_WIDE = (
    *("ffn_gate_inp.weight", ".bias", "ssm_a", "ssm_d", "ssm_norm.weight", "ssm_conv1d.weight"),
    *(f"ssm_conv1d_{part}.weight" for part in "qkv"),
)
"""Float32 in every file, as are vectors."""

_IN_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.*?)(?:(?<=experts\.)(\d+)(\..*))?$")


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
    if part.endswith(".kv_b_proj.weight"):
        of_heads = array.reshape(config["num_attention_heads"], -1, array.shape[-1])
        keys, values = np.split(of_heads, [config["qk_nope_head_dim"]], axis=1)
        return [("attn_k_b.weight", keys.swapaxes(1, 2)), ("attn_v_b.weight", values)]
    if part == "mlp.experts.down_proj":
        return [("ffn_down_exps.weight", array.swapaxes(1, 2))]
    if part.startswith("mlp.experts.gate_up_proj"):
        is_bias = part.endswith("_bias")
        kind, rows = "bias" if is_bias else "weight", array if is_bias else array.swapaxes(1, 2)
        return [(f"ffn_{name}_exps.{kind}", rows[:, start::2]) for start, name in enumerate(("gate", "up"))]
    if part.endswith("input_linear.weight"):
        kind = "shexp" if part.startswith("shared") else "exps"
        halves = zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True)
        return [(f"ffn_{name}_{kind}.weight", half) for name, half in halves]
    if part == "attention.g_proj.weight":
        is_by_head = len(array) == config["num_attention_heads"]
        return [("attn_gate.weight" if is_by_head else "ssm_g_a.weight", array)]
    if held_by := _OF_MIXER.get(part.partition(".")[0]):
        return [(names[part], held_by(part.partition(".")[2], array, config))]
    if part == "mlp.shared_expert_gate.weight":
        return [(names[part], array.ravel())]
    return [(names[part], array)]


def _full_scale(name: str, array: np.ndarray) -> np.ndarray:
    """Return scales of norms as they multiply: files hold them without 1, except the norm of gated delta layers."""
    is_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return np.float32(1) + widened(array) if is_offset else array


def _mamba_held(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a tensor of a Mamba-2 layer: numbers of heads in rows, taps by channel, the norm by group."""
    if name in ("A_log", "D"):
        column = widened(array).reshape(-1, 1)
        return -np.exp(column) if name == "A_log" else column
    if name == "conv1d.weight":
        return widened(array.reshape(len(array), -1))
    if name == "norm.weight":
        return widened(array.reshape(config.get("n_groups", config.get("mamba_n_groups")), -1))
    return array


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


def _kimi_delta_held(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a tensor of a Kimi delta or attention layer: rates of decay in a column, negated for Kimi-Linear."""
    if name != "A_log":
        return array
    rates = np.exp(widened(array)).reshape(-1, 1)
    return rates if config["model_type"] == LING_3 else -rates


_OF_MIXER = {
    **dict.fromkeys(("mixer", "mamba"), _mamba_held),
    "linear_attn": _delta_held,
    **dict.fromkeys(("self_attn", "attention"), _kimi_delta_held),
}
"""Function that returns llama.cpp's form of a mixer's tensor, by the prefix of the tensor's name."""


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
