"""Random models shaped like those of several families, each tiny, of about 100 M, and of about 1 B parameters."""

from __future__ import annotations

from typing import Any

from rayserve_moe.checkpoints.synthetic_models import SyntheticModel

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

_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "attention_bias": True, "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 1024,
    },
}  # fmt: skip


def _gpt_oss(sizes: dict[str, Any], **more: Any) -> SyntheticModel:
    layer_types = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
    return SyntheticModel(_GPT_OSS | sizes | {"layer_types": layer_types} | more)


FAMILY_PRESETS = {
    # Norms over whole projections, every head with keys of its own, no shared expert: 2.0 M, 118 M and 991 M
    "olmoe-tiny": SyntheticModel(
        _OLMOE | _TINY | {
            "num_key_value_heads": 4, "intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 2,
        }
    ),
    "olmoe-small": SyntheticModel(
        _OLMOE | _SMALL | {
            "num_key_value_heads": 8, "intermediate_size": 256, "num_experts": 32, "num_experts_per_tok": 4,
        }
    ),
    "olmoe-mid": SyntheticModel(
        _OLMOE | _MID | {
            "num_key_value_heads": 16, "intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8,
        }
    ),
    # Latent attention, a shared expert, grouped and biased routing, a dense first layer; the cache rows of the larger
    # two have the published width: 1.7 M, 113 M and 1.01 B
    "deepseek-v3-tiny": SyntheticModel(
        _DEEPSEEK | _TINY | {
            "num_key_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 64, "n_routed_experts": 16,
            "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 64, "kv_lora_rank": 32,
            "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        }
    ),
    "deepseek-v3-small": SyntheticModel(
        _DEEPSEEK | _SMALL | {
            "num_key_value_heads": 8, "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 32,
            "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 256, "kv_lora_rank": 512,
            "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        }
    ),
    "deepseek-v3-mid": SyntheticModel(
        _DEEPSEEK | _MID | {
            "num_hidden_layers": 13,
            "num_key_value_heads": 16, "intermediate_size": 2048, "moe_intermediate_size": 384,
            "n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "q_lora_rank": 384,
            "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        }
    ),
    # Sinks, windows in every other layer, biases, gate and up in turns in one tensor: 1.9 M, 115 M and 973 M
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
}  # fmt: skip
"""By the name that follows `synthetic:`."""
