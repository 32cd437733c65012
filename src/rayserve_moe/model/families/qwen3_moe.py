"""Qwen3-MoE: how its config becomes a ModelSpec, and what its tensors are called in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

    Raises UnsupportedModelError for what this family does not compute, by key and value; KeyError never: a missing
    key is an UnsupportedModelError that names it.
    """
    _refuse_unsupported(config)
    heads = _required(config, "num_attention_heads")
    head_dim = config.get("head_dim") or _required(config, "hidden_size") // heads
    return ModelSpec(
        family="qwen3_moe",
        vocab_size=_required(config, "vocab_size"),
        hidden_size=_required(config, "hidden_size"),
        num_layers=_required(config, "num_hidden_layers"),
        dense_layer_ids=_dense_layer_ids(config),
        dense_intermediate_size=_required(config, "intermediate_size"),
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            bias=bool(config.get("attention_bias", False)),
            qk_norm="head",
        ),
        rope=RopeSpec(theta=_rope_theta(config)),
        router=RouterSpec(
            num_experts=_num_experts(config),
            top_k=_required(config, "num_experts_per_tok"),
            renormalize=bool(config.get("norm_topk_prob", False)),
        ),
        experts=ExpertSpec(_required(config, "moe_intermediate_size")),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _required(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _num_experts(config: Mapping[str, Any]) -> int:
    return _required(config, "num_local_experts" if config.get("num_local_experts") is not None else "num_experts")


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_theta(config: Mapping[str, Any]) -> float:
    return float(_rope_parameters(config).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _dense_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    listed = set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step") or 1
    return tuple(i for i in range(_required(config, "num_hidden_layers")) if i in listed or (i + 1) % every != 0)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    rope = _rope_parameters(config)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    wanted = {
        "rope_type": (rope_type, ("default",)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1, 1.0)),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), (False,)),
        "quantization_config": (config.get("quantization_config"), (None,)),
    }
    for key, (value, supported) in wanted.items():
        if value not in supported:
            raise UnsupportedModelError(
                f"config.json: {key} = {value!r} is not supported for qwen3_moe (only {supported[0]!r})"
            )
