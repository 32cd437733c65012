"""The policy's weights by the checkpoint's names: read, stacked by layer and expert, rounded, written back."""

# V vocabulary   D model width   L layers   H query heads x head width   G KV heads x head width   h head width
# E experts   F expert width   W channels of a convolution   J taps   v width of a value head, V value heads x v

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Params = dict[str, jax.Array]
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_LAYER, _EXPERT = "model.layers.{layer}.", "model.layers.{layer}.mlp.experts.{expert}."
TENSORS = {
    "table_VD": "model.embed_tokens.weight",
    "final_norm_D": "model.norm.weight",
    "head_VD": "lm_head.weight",
    "attn_norm_LD": _LAYER + "input_layernorm.weight",
    "q_LHD": _LAYER + "self_attn.q_proj.weight",
    "k_LGD": _LAYER + "self_attn.k_proj.weight",
    "v_LGD": _LAYER + "self_attn.v_proj.weight",
    "o_LDH": _LAYER + "self_attn.o_proj.weight",
    "q_norm_Lh": _LAYER + "self_attn.q_norm.weight",
    "k_norm_Lh": _LAYER + "self_attn.k_norm.weight",
    "mlp_norm_LD": _LAYER + "post_attention_layernorm.weight",
    "router_LED": _LAYER + "mlp.gate.weight",
    "gate_LEFD": _EXPERT + "gate_proj.weight",
    "up_LEFD": _EXPERT + "up_proj.weight",
    "down_LEDF": _EXPERT + "down_proj.weight",
}
"""Name pattern of each stack of tensors in checkpoints, by our name."""
_SHARED, _DELTA = _LAYER + "mlp.shared_expert", _LAYER + "linear_attn."
SHARED_EXPERT = {
    "shared_gate_LFD": _SHARED + ".gate_proj.weight",
    "shared_up_LFD": _SHARED + ".up_proj.weight",
    "shared_down_LDF": _SHARED + ".down_proj.weight",
    "shared_share_L1D": _SHARED + "_gate.weight",
}
DELTA = {
    "qkv_LWD": _DELTA + "in_proj_qkv.weight",
    "z_LVD": _DELTA + "in_proj_z.weight",
    "b_LHD": _DELTA + "in_proj_b.weight",
    "a_LHD": _DELTA + "in_proj_a.weight",
    "taps_LW1J": _DELTA + "conv1d.weight",
    "decay_LH": _DELTA + "A_log",
    "decay_bias_LH": _DELTA + "dt_bias",
    "delta_norm_Lv": _DELTA + "norm.weight",
    "delta_out_LDV": _DELTA + "out_proj.weight",
}
HYBRID_TENSORS = {**TENSORS, **SHARED_EXPERT, **DELTA}
"""The same for a hybrid model; attention and gated delta layers have stacks of their own, of fewer layers."""
OUTSIDE_LAYERS = ("table_VD", "final_norm_D", "head_VD")
FULL_ATTENTION = tuple(name for name, template in TENSORS.items() if ".self_attn." in template)


@dataclass(frozen=True)
class DeltaShape:
    """Gated delta layers of a hybrid model, with the layers that are attention instead."""

    full_layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Architecture:
    """What the forward pass must know beside the weights."""

    num_layers: int
    num_experts: int
    top_k: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rotary_dim: int
    """Elements of a head that rotate."""
    delta: DeltaShape | None = None
    """The gated delta mixer; None without recurrent layers."""

    @property
    def norm_offset(self) -> float:
        """Added to the scales of norms: hybrid models hold scales minus one."""
        return 0.0 if self.delta is None else 1.0

    @property
    def tensors(self) -> dict[str, str]:
        """Return the checkpoint's name pattern of each stack of tensors, by our name."""
        return TENSORS if self.delta is None else HYBRID_TENSORS

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The layers of a stack."""
        full = range(self.num_layers) if self.delta is None else self.delta.full_layers
        if name in DELTA:
            return tuple(layer for layer in range(self.num_layers) if layer not in full)
        return tuple(full) if name in FULL_ATTENTION else tuple(range(self.num_layers))


def read_architecture(directory: Path) -> Architecture:
    """Read config.json. ValueError for a model that this forward pass is not written for."""
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    is_hybrid = config["model_type"] == "qwen3_5_moe_text"
    is_known = is_hybrid or (config["model_type"] == "qwen3_moe" and config["norm_topk_prob"])
    if not is_known or config.get("mlp_only_layers"):
        raise ValueError(f"{directory}: the trainer supports Qwen3-MoE and Qwen3.5-MoE with experts in every layer")
    rope = config.get("rope_parameters") or config
    return Architecture(
        num_layers=config["num_hidden_layers"],
        num_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rotary_dim=int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)),
        delta=_delta_shape(config) if is_hybrid else None,
    )


def _delta_shape(config: dict[str, Any]) -> DeltaShape:
    kinds = config["layer_types"]
    return DeltaShape(
        tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
    )


def read_params(directory: Path, architecture: Architecture) -> Params:
    """Read a checkpoint of one file into float32 stacks."""
    return params_of(load_file(directory / WEIGHTS_FILE), architecture)


def params_of(tensors: dict[str, np.ndarray], architecture: Architecture) -> Params:
    """Tensors by the checkpoint's names as float32 stacks."""
    return {
        name: jnp.asarray(_stacked([tensors[n] for n in names], name, architecture))
        for name, names in _names(architecture).items()
    }


def checkpoint_tensors(params: Params, architecture: Architecture) -> dict[str, np.ndarray]:
    """The weights as they travel: by the checkpoint's names, in bfloat16, rounded to nearest even."""
    tensors: dict[str, np.ndarray] = {}
    for name, names in _names(architecture).items():
        stack = np.asarray(params[name])
        parts = stack.reshape(len(names), *stack.shape[_num_stacked(name, architecture) :])
        tensors |= {n: part.astype(ml_dtypes.bfloat16) for n, part in zip(names, parts, strict=True)}
    return tensors


def rounded(params: Params) -> Params:
    """The values that `checkpoint_tensors` sends, in float32; gradients pass to the weights unrounded."""
    return {name: values + jax.lax.stop_gradient(_nearest(values) - values) for name, values in params.items()}


def write_policy(tensors: dict[str, np.ndarray], directory: Path, *, model: Path) -> None:
    """Write a checkpoint with all that serving needs: the tensors, and the other files of another directory."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns(WEIGHTS_FILE, "__pycache__"))
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def _nearest(values: jax.Array) -> jax.Array:
    return values.astype(jnp.bfloat16).astype(jnp.float32)


def _num_stacked(name: str, architecture: Architecture) -> int:
    return architecture.tensors[name].count("{")


def _names(architecture: Architecture) -> dict[str, list[str]]:
    """By our name of a stack the checkpoint's names of its tensors, in order."""
    found = {}
    for name, template in architecture.tensors.items():
        layers = architecture.layers_of(name) if "{layer}" in template else (0,)
        experts = range(architecture.num_experts if "{expert}" in template else 1)
        found[name] = [template.format(layer=layer, expert=expert) for layer in layers for expert in experts]
    return found


def _stacked(parts: list[np.ndarray], name: str, architecture: Architecture) -> np.ndarray:
    num_stacked = _num_stacked(name, architecture)
    sizes = (len(architecture.layers_of(name)), architecture.num_experts)[:num_stacked]
    return np.stack(parts).astype(np.float32).reshape(*sizes, *parts[0].shape)
