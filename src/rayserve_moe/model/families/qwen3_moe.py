"""Qwen3-MoE: how its config becomes a ModelSpec, and what its tensors are called in files."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_values import integer_of, number_of, object_of
from rayserve_moe.model.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec, RouterSpec, UnsupportedModelError

ARCHITECTURE = "Qwen3MoeForCausalLM"

CHECKPOINT_RULES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "q": "model.layers.{layer}.self_attn.q_proj.weight",
    "k": "model.layers.{layer}.self_attn.k_proj.weight",
    "v": "model.layers.{layer}.self_attn.v_proj.weight",
    "o": "model.layers.{layer}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "o_bias": "model.layers.{layer}.self_attn.o_proj.bias",
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "router": "model.layers.{layer}.mlp.gate.weight",
    "expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    "dense_gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "dense_up": "model.layers.{layer}.mlp.up_proj.weight",
    "dense_down": "model.layers.{layer}.mlp.down_proj.weight",
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json`, in the spelling of the published files or of transformers 5.

    Raises UnsupportedModelError and nothing else, by key and value: for what this family does not compute, for a key
    that is missing, and for numbers that no model has.
    """
    _refuse_unsupported(config)
    heads = integer_of(config, "num_attention_heads")
    hidden_size = integer_of(config, "hidden_size")
    return ModelSpec(
        family="qwen3_moe",
        vocab_size=integer_of(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=integer_of(config, "num_hidden_layers"),
        dense_layer_ids=_dense_layer_ids(config),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=integer_of(config, "num_key_value_heads", heads),
            head_dim=integer_of(config, "head_dim", hidden_size // heads),
            bias=bool(config.get("attention_bias", False)),
            output_bias=bool(config.get("attention_bias", False)),
            qk_norm="head",
        ),
        rope=RopeSpec(theta=_rope_theta(config)),
        router=RouterSpec(
            num_experts=_num_experts(config),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=bool(config.get("norm_topk_prob", False)),
        ),
        experts=ExpertSpec(integer_of(config, "moe_intermediate_size")),
        norm_eps=number_of(config, "rms_norm_eps", 1e-6),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=integer_of(config, "max_position_embeddings", 32768),
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _num_experts(config: Mapping[str, Any]) -> int:
    return integer_of(config, "num_local_experts" if config.get("num_local_experts") is not None else "num_experts")


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return object_of(config, "rope_parameters") or object_of(config, "rope_scaling")


def _rope_theta(config: Mapping[str, Any]) -> float:
    return number_of(_rope_parameters(config), "rope_theta", number_of(config, "rope_theta", 10000.0))


def _dense_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list | tuple) or any(type(layer) is not int for layer in listed):
        raise UnsupportedModelError(f"config.json: mlp_only_layers must be a list of layers: {reprlib.repr(listed)}")
    dense, every = set(listed), integer_of(config, "decoder_sparse_step", 1)
    return tuple(i for i in range(integer_of(config, "num_hidden_layers")) if i in dense or (i + 1) % every != 0)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    rope = _rope_parameters(config)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    wanted = {
        "rope_type": (rope_type, ("default",)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1, 1.0)),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), (False,)),
    }
    for key, (value, supported) in wanted.items():
        if value not in supported:
            raise UnsupportedModelError(
                f"config.json: {key} = {reprlib.repr(value)} is not supported for qwen3_moe (only {supported[0]!r})"
            )
