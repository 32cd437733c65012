"""Metadata of GGUF files of llama.cpp: the sizes in a checkpoint's config under their GGUF keys."""

from __future__ import annotations

from typing import Any

OTHER_KEYS = {
    "rms_norm_eps": ("layernorm_epsilon", "layer_norm_epsilon"),
    "num_experts_per_tok": ("top_k_experts",),
}
"""Config keys that some families use under another name."""
NO_ROTATION = {"rope_theta": 10000.0}
"""Rotation base that a GGUF file must name even for a model without rotation."""
SIGMOID = 2
"""llama.cpp's number for scores of experts that are sigmoids."""


def sizes_of(config: dict[str, Any]) -> dict[str, int | float | bool | str | list[int]]:
    """Return sizes under llama.cpp's names, without the prefix of the architecture. KeyError for other families."""
    config = {key: config[other] for key, others in OTHER_KEYS.items() for other in others if other in config} | config
    rope = {**NO_ROTATION, **config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
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


def _latent_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of latent attention: a cached row is the latent with the rotated key; `_mla` are of a head."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
    }


def _biased_expert_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of experts, shared experts and groups, whose router takes sigmoids and a selection bias."""
    return {
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": SIGMOID,
    }


def _deepseek_v3_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes with one KV head, the latent with the rotated key."""
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        **_latent_sizes(config),
        "expert_count": config["n_routed_experts"],
        **_biased_expert_sizes(config),
    }


def _kimi_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes with a KV head, the latent, in the layers that attend, and none in Kimi delta layers."""
    return {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config["layer_types"]],
        **_latent_sizes(config),
        "kda.head_dim": config["linear_head_dim"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "expert_count": config["num_experts"],
        **_biased_expert_sizes(config),
    }


def _ling_3_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes with a KV head, the latent, in the last layer of each group, and none in Kimi delta layers."""
    group = config["layer_group_size"]
    return {
        "attention.head_count_kv": [int((layer + 1) % group == 0) for layer in range(config["num_hidden_layers"])],
        **_latent_sizes(config),
        "kda.head_dim": config["head_dim"],
        "kda.safe_gate": config["kda_safe_gate"],
        "kda.gate_lower_bound": config["kda_lower_bound"],
        "ssm.conv_kernel": config["short_conv_kernel_size"],
        "expert_count": config["num_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        **_biased_expert_sizes(config),
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


def _mamba_sizes(config: dict[str, Any], names: tuple[str, str, str, str, str]) -> dict[str, Any]:
    """Return the sizes of Mamba-2 layers under the config's `names`: heads, head width, groups, state and taps."""
    num_heads, head, groups, state, taps = (config[name] for name in names)
    return {
        "ssm.conv_kernel": taps,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": num_heads * head,
        "ssm.time_step_rank": num_heads,
        "rope.scaling.finetuned": False,
    }


def _nemotron_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return sizes by layer: those with KV heads attend, those with a width have experts, others are Mamba-2.

    llama.cpp requires the epsilon of prediction layers, whether or not a file has such layers.
    """
    pattern, width = config["hybrid_override_pattern"], config["moe_intermediate_size"]
    return {
        **_mamba_sizes(config, ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")),
        "attention.head_count_kv": [config["num_key_value_heads"] * (letter == "*") for letter in pattern],
        "attention.layer_norm_epsilon": config["rms_norm_eps"],
        "feed_forward_length": [width * (letter == "E") for letter in pattern],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": width,
        "expert_shared_count": config["n_shared_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
    }


def _granite_4_sizes(config: dict[str, Any]) -> dict[str, Any]:
    names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    are_attending = [kind == "attention" for kind in config["layer_types"]]
    return {
        **_mamba_sizes(config, names),
        "attention.head_count_kv": [config["num_key_value_heads"] * is_attending for is_attending in are_attending],
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_count": config["num_local_experts"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
    }


_FAMILY_SIZES = {
    "qwen3_moe": _qwen3_moe_sizes,
    "olmoe": _olmoe_sizes,
    "deepseek_v3": _deepseek_v3_sizes,
    "gpt_oss": _gpt_oss_sizes,
    "qwen3_5_moe_text": _qwen3_5_sizes,
    "gemma4_text": _gemma_4_sizes,
    "mimo_v2_flash": _mimo_sizes,
    "nemotron_h": _nemotron_sizes,
    "kimi_linear": _kimi_sizes,
    "bailing_hybrid": _ling_3_sizes,
    "granitemoehybrid": _granite_4_sizes,
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
