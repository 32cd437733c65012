"""Configs of the synthetic checkpoints, by preset: the families but Qwen3-MoE, each in three sizes."""

from __future__ import annotations

from typing import Any

_TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
_SMALL = _TINY | {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
_MID = _TINY | {"vocab_size": 16384, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16}
_OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "norm_topk_prob": False, "attention_bias": False, "clip_qkv": None,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "attention_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
_QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "rms_norm_eps": 1e-6,
    "attention_bias": False, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "attention_bias": True, "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 1024,
    },
}  # fmt: skip
_GEMMA_4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "rms_norm_eps": 1e-6,
    "attention_bias": False, "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "tie_word_embeddings": True, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
_MIMO: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "layernorm_epsilon": 1e-5,
    "rope_theta": 5000000.0, "swa_rope_theta": 10000.0, "partial_rotary_factor": 0.334, "attention_bias": False,
    "attention_value_scale": 0.707, "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
    "n_group": 1, "topk_group": 1, "n_shared_experts": None, "norm_topk_prob": True, "routed_scaling_factor": None,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip

_NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True, "residual_in_fp32": False,
    "time_step_min": 0.001, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "conv_kernel": 4,
}  # fmt: skip
_GRANITE_4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "rms_norm_eps": 1e-5,
    "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
    "logits_scaling": 4.0, "residual_multiplier": 0.22, "position_embedding_type": "nope", "mamba_conv_bias": True,
    "mamba_proj_bias": False, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1,
}  # fmt: skip
_KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "rms_norm_eps": 1e-5,
    "mla_use_nope": True, "q_lora_rank": None, "linear_conv_kernel_dim": 4, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.446,
}  # fmt: skip
_LING_3: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "rms_norm_eps": 1e-6,
    "rope_theta": 6000000.0, "rope_interleave": True, "q_lora_rank": None, "short_conv_kernel_size": 4,
    "layer_group_size": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "kda_safe_gate": True, "kda_lower_bound": -5.0, "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise", "moe_router_enable_expert_bias": True,
    "num_nextn_predict_layers": 0,
}  # fmt: skip


def _nemotron(sizes: dict[str, Any], pattern: str, **more: Any) -> dict[str, Any]:
    """Return a config with a layer for each letter: Mamba-2, attention (`*`) or experts."""
    found = _NEMOTRON | sizes | {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)} | more
    return {key: value for key, value in found.items() if key != "hidden_act"}


def _granite_4(sizes: dict[str, Any], *, every: int, **more: Any) -> dict[str, Any]:
    """Return a config whose every `every`-th layer attends."""
    found = _GRANITE_4 | sizes | more
    kinds = ["mamba" if (layer + 1) % every else "attention" for layer in range(found["num_hidden_layers"])]
    return found | {"layer_types": kinds, "tie_word_embeddings": True}


def _kimi(sizes: dict[str, Any], *, every: int, **more: Any) -> dict[str, Any]:
    """Return a config whose every `every`-th layer attends; the others are Kimi delta layers."""
    found = _KIMI | sizes | more
    layers = range(1, found["num_hidden_layers"] + 1)
    return found | {"layer_types": ["linear_attention" if layer % every else "full_attention" for layer in layers]}


def _gpt_oss(sizes: dict[str, Any], **more: Any) -> dict[str, Any]:
    layer_types = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
    return _GPT_OSS | sizes | {"layer_types": layer_types} | more


def _gemma_4(sizes: dict[str, Any], *, every: int, **more: Any) -> dict[str, Any]:
    """Return a config whose every `every`-th layer has no window."""
    found = sizes | _GEMMA_4 | more
    kinds = (
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
        for layer in range(found["num_hidden_layers"])
    )
    return {key: value for key, value in found.items() if key != "hidden_act"} | {"layer_types": list(kinds)}


def _mimo(sizes: dict[str, Any], *, full: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return a config with the layers `full` without a window, and a dense first layer."""
    found, head_keys = _MIMO | sizes | more, ("num_attention_heads", "head_dim", "v_head_dim")
    layers = range(found["num_hidden_layers"])
    return found | {
        **{f"swa_{key}": found[key] for key in head_keys},
        "hybrid_layer_pattern": [int(layer not in full) for layer in layers],
        "moe_layer_freq": [int(layer > 0) for layer in layers],
    }


FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    # Three recurrent layers, then gated attention: 2.1 M, 122 M and 1.01 B
    "qwen3.5-tiny": (
        _QWEN3_5 | _TINY | {
            "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 16,
            "num_experts_per_tok": 4, "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        }
    ),
    "qwen3.5-small": (
        _QWEN3_5 | _SMALL | {
            "num_key_value_heads": 2, "head_dim": 128, "moe_intermediate_size": 256, "num_experts": 32,
            "num_experts_per_tok": 4, "shared_expert_intermediate_size": 256, "linear_num_key_heads": 4,
            "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        }
    ),
    "qwen3.5-mid": (
        _QWEN3_5 | _MID | {
            "num_key_value_heads": 2, "head_dim": 128, "moe_intermediate_size": 384, "num_experts": 64,
            "num_experts_per_tok": 8, "shared_expert_intermediate_size": 384, "linear_num_key_heads": 8,
            "linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        }
    ),
    # Norms over whole projections, keys per head, no shared expert: 2.0 M, 118 M and 991 M
    "olmoe-tiny": (
        _OLMOE | _TINY | {
            "num_key_value_heads": 4, "intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 2,
        }
    ),
    "olmoe-small": (
        _OLMOE | _SMALL | {
            "num_key_value_heads": 8, "intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4,
        }
    ),
    "olmoe-mid": (
        _OLMOE | _MID | {
            "num_key_value_heads": 16, "intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8,
        }
    ),
    # Latent attention, a shared expert, grouped and biased routing, a dense first layer; the cache rows of the larger
    # two have the published width: 1.7 M, 113 M and 1.01 B
    "deepseek-v3-tiny": (
        _DEEPSEEK | _TINY | {
            "num_key_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 64, "n_routed_experts": 16,
            "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 64, "kv_lora_rank": 32,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        }
    ),
    "deepseek-v3-small": (
        _DEEPSEEK | _SMALL | {
            "num_key_value_heads": 8, "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 32,
            "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 256, "kv_lora_rank": 512,
            "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        }
    ),
    "deepseek-v3-mid": (
        _DEEPSEEK | _MID | {
            "num_hidden_layers": 13,
            "num_key_value_heads": 16, "intermediate_size": 2048, "moe_intermediate_size": 384,
            "n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "q_lora_rank": 384,
            "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        }
    ),
    # Sinks, windows in every other layer, biases, interleaved gate and up in a single tensor: 1.9 M, 115 M and 973 M
    "gpt-oss-tiny": _gpt_oss(
        _TINY, num_key_value_heads=2, head_dim=32, intermediate_size=64, num_local_experts=16, num_experts_per_tok=4,
        sliding_window=16,
    ),
    "gpt-oss-small": _gpt_oss(
        _SMALL, num_key_value_heads=2, head_dim=64, intermediate_size=256, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128,
    ),
    "gpt-oss-mid": _gpt_oss(
        _MID, num_key_value_heads=4, head_dim=64, intermediate_size=384, num_local_experts=64, num_experts_per_tok=4,
        sliding_window=128,
    ),
    # Fewer and wider heads without windows, whose keys are values; an MLP beside the experts: 2.0 M, 107 M and 1.03 B
    "gemma-4-tiny": _gemma_4(
        _TINY, every=4, num_key_value_heads=2, head_dim=32, num_global_key_value_heads=1, global_head_dim=64,
        intermediate_size=96, moe_intermediate_size=64, num_experts=16, top_k_experts=4, sliding_window=16,
    ),
    "gemma-4-small": _gemma_4(
        _SMALL, every=6, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2, head_dim=256,
        num_global_key_value_heads=1, global_head_dim=512, intermediate_size=384, moe_intermediate_size=128,
        num_experts=32, top_k_experts=4, sliding_window=128,
    ),
    "gemma-4-mid": _gemma_4(
        _MID, every=6, num_attention_heads=8, num_key_value_heads=4, head_dim=256, num_global_key_value_heads=1,
        global_head_dim=512, intermediate_size=768, moe_intermediate_size=384, num_experts=64, top_k_experts=8,
        sliding_window=128,
    ),
    # Values narrower than keys, windows with sinks and other KV heads, a dense first layer: 1.6 M, 113 M and 954 M
    "mimo-v2-flash-tiny": _mimo(
        _TINY, full=(0, 3), num_key_value_heads=1, swa_num_key_value_heads=2, head_dim=48, v_head_dim=32,
        intermediate_size=256, moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=4, sliding_window=16,
    ),
    "mimo-v2-flash-small": _mimo(
        _SMALL, full=(0, 5), num_key_value_heads=1, swa_num_key_value_heads=2, head_dim=192, v_head_dim=128,
        intermediate_size=2048, moe_intermediate_size=256, n_routed_experts=32, num_experts_per_tok=4,
        sliding_window=128,
    ),
    "mimo-v2-flash-mid": _mimo(
        _MID, full=(0, 5, 11), num_key_value_heads=2, swa_num_key_value_heads=4, head_dim=192, v_head_dim=128,
        intermediate_size=4096, moe_intermediate_size=384, n_routed_experts=64, num_experts_per_tok=8,
        sliding_window=128,
    ),
    # Mamba-2, attention without rotation, and experts without a gate, each in a layer of its own:
    # 1.8 M, 118 M and 982 M
    "nemotron-3-tiny": _nemotron(
        _TINY, "MEM*EME", num_key_value_heads=2, head_dim=32, mamba_num_heads=8, mamba_head_dim=32, n_groups=2,
        ssm_state_size=32, moe_intermediate_size=96, moe_shared_expert_intermediate_size=128, n_routed_experts=16,
        num_experts_per_tok=4,
    ),
    "nemotron-3-small": _nemotron(
        _SMALL, "MEMEM*EMEMEM*EME", num_key_value_heads=2, head_dim=128, mamba_num_heads=16, mamba_head_dim=64,
        n_groups=2, ssm_state_size=128, moe_intermediate_size=384, moe_shared_expert_intermediate_size=768,
        n_routed_experts=32, num_experts_per_tok=4,
    ),
    "nemotron-3-mid": _nemotron(
        _MID, "MEMEM*EMEMEM*EMEMEM*EME", num_key_value_heads=2, head_dim=128, mamba_num_heads=32, mamba_head_dim=64,
        n_groups=2, ssm_state_size=128, moe_intermediate_size=640, moe_shared_expert_intermediate_size=1280,
        n_routed_experts=64, num_experts_per_tok=6,
    ),
    # Mamba-2 or attention without rotation, then gated experts beside a shared one: 2.1 M, 106 M and 962 M
    "granite-4-tiny": _granite_4(
        _TINY, every=4, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=32,
        intermediate_size=64, shared_intermediate_size=64, num_local_experts=16, num_experts_per_tok=4,
    ),
    "granite-4-small": _granite_4(
        _SMALL, every=4, num_key_value_heads=2, mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128,
        intermediate_size=192, shared_intermediate_size=384, num_local_experts=36, num_experts_per_tok=5,
    ),
    "granite-4-mid": _granite_4(
        _MID, every=6, num_key_value_heads=4, mamba_n_heads=32, mamba_d_head=64, mamba_d_state=128,
        intermediate_size=320, shared_intermediate_size=640, num_local_experts=72, num_experts_per_tok=8,
    ),
    # Kimi delta layers, and latent attention without rotation in every fourth, a dense first layer:
    # 1.8 M, 111 M and 939 M
    "kimi-linear-tiny": _kimi(
        _TINY, every=4, num_key_value_heads=4, linear_num_heads=4, linear_head_dim=32, kv_lora_rank=32,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, intermediate_size=256, moe_intermediate_size=64,
        num_experts=16, num_experts_per_tok=4,
    ),
    "kimi-linear-small": _kimi(
        _SMALL, every=4, num_key_value_heads=8, linear_num_heads=8, linear_head_dim=64, kv_lora_rank=512,
        qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, intermediate_size=1024, moe_intermediate_size=256,
        num_experts=32, num_experts_per_tok=4,
    ),
    "kimi-linear-mid": _kimi(
        _MID, every=4, num_key_value_heads=16, linear_num_heads=16, linear_head_dim=64, kv_lora_rank=512,
        qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, intermediate_size=2048, moe_intermediate_size=384,
        num_experts=64, num_experts_per_tok=8,
    ),
    # The same with bounded decays, a gate per head of rotated latent attention, and groups of experts:
    # 1.8 M, 114 M and 955 M
    "ling-3-tiny": (
        _LING_3 | _TINY | {
            "num_key_value_heads": 4, "head_dim": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
            "topk_group": 2,
        }
    ),
    "ling-3-small": (
        _LING_3 | _SMALL | {
            "num_key_value_heads": 8, "head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 1024, "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4, "n_group": 4,
            "topk_group": 2,
        }
    ),
    "ling-3-mid": (
        _LING_3 | _MID | {
            "num_key_value_heads": 16, "head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 2048, "moe_intermediate_size": 384,
            "moe_shared_expert_intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8, "n_group": 8,
            "topk_group": 4,
        }
    ),
}  # fmt: skip
"""By the name that follows `synthetic:`."""
