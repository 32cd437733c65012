"""Three tiny models of every family: together they give each of its knobs a value that shows. No torch here."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticModel, write_checkpoint
from rayserve_moe.model import families
from tests.support.models.core import CORE_CONFIG

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "intermediate_size": 96}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "num_key_value_heads": 2}
_GLM = {**_LATENT, "num_key_value_heads": 2, "head_dim": 16, "first_k_dense_replace": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_MSCALE = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 4.0}
_M3 = {
    **_LOCAL, "dense_intermediate_size": 96, "shared_intermediate_size": 48, "head_dim": 32, "rotary_dim": 16,
    "index_n_heads": 1, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_GROWING = {**_LATENT, "n_group": 1, "topk_group": 1}
_GROWN = {
    **_YARN, "rope_theta": 20.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0, "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MIMO = {
    "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "intermediate_size": 96, "sliding_window": 12,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e2, "factor": 4.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 8.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
_STEP = {
    "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "share_expert_dim": 32,
    "moe_intermediate_size": 32, "intermediate_size": 96, "sliding_window": 12, "num_sliding_attention_heads": 8,
    "moe_router_scaling_factor": 3.0,
}  # fmt: skip

_LING = {
    "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
    "rope_theta": 6e5, "partial_rotary_factor": 0.5,
}  # fmt: skip

_HY = {**_EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "num_shared_experts": 1}
_DOTS = {
    "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 16, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "num_key_value_heads": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_SOLAR = {
    "moe_intermediate_size": 32, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_INDEXED = {
    **_LATENT, "q_lora_rank": 20, "first_k_dense_replace": 1, "index_n_heads": 32, "index_head_dim": 16,
    "index_topk": 24,
}  # fmt: skip

_TRINITY = {
    **_EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "num_shared_experts": 1, "sliding_window": 12,
    "route_scale": 2.826, "mup_enabled": True,
}  # fmt: skip

_SLIDING_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
_LAGUNA = {
    **_EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "shared_expert_intermediate_size": 32, "sliding_window": 12,
    "moe_routed_scaling_factor": 2.5, "rope_parameters": {
        "full_attention": {**_YARN, "rope_theta": 5e3, "partial_rotary_factor": 0.5, "attention_factor": 1.1},
        "sliding_attention": _SLIDING_ROPE,
    },
}  # fmt: skip

_GEMMA = {
    "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32, "intermediate_size": 48, "head_dim": 16,
    "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "sliding_window": 12, "enable_moe_block": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0,
    "rms_norm_eps": 1e-2,  # The norm of the experts' sum undoes its scale: whether weights add up to 1 shows by this.
}  # fmt: skip
_SHARED_ROPE = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

_HYBRID = {
    **_EXPERTS, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4}
_SHORT = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}

_GRANITE_4 = {
    **_LOCAL, "shared_intermediate_size": 48, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24,
    "attention_multiplier": 0.3,
}  # fmt: skip
_NEMOTRON = {
    "head_dim": 16, "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
    "ssm_state_size": 24, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "intermediate_size": 96,
}  # fmt: skip


def _nemotron(pattern: str, **changes: Any) -> dict[str, Any]:
    types = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    layers = {"num_hidden_layers": len(pattern), "layers_block_type": [types[letter] for letter in pattern]}
    return {**_NEMOTRON, **layers, **changes}


_LING_3 = {**{key: value for key, value in _LATENT.items() if key != "n_routed_experts"}, "num_experts": 16}
_KIMI = {**_LING_3, "linear_num_heads": 4, "linear_head_dim": 16}

FAMILY_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": (
        {**_EXPERTS, "num_key_value_heads": 2, "head_dim": 32, "norm_topk_prob": True},
        {**_EXPERTS, "num_key_value_heads": 4, "head_dim": 16, "mlp_only_layers": [0], "attention_bias": True},
        {**_EXPERTS, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "qwen2_moe": (
        {**_EXPERTS, "num_key_value_heads": 2, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
        {
            **_EXPERTS, "num_key_value_heads": 4, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2,
            "num_hidden_layers": 4, "qkv_bias": False,
        },
        {
            **_EXPERTS, "num_key_value_heads": 2, "shared_expert_intermediate_size": 32, "tie_word_embeddings": True,
            "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 3,
        },
    ),
    "qwen3_next": (
        {**_HYBRID, "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.5}},
        {
            **_HYBRID, **_SHORT, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_conv_kernel_dim": 3, "norm_topk_prob": False, "mlp_only_layers": [1], "num_key_value_heads": 4,
        },
        {
            **_HYBRID, "num_hidden_layers": 5, "full_attention_interval": 2, "linear_num_value_heads": 8,
            "linear_value_head_dim": 8, "tie_word_embeddings": True, "num_key_value_heads": 1,
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        },
    ),
    "qwen3_5_moe_text": (
        {**_HYBRID, "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.25}},
        {
            **_HYBRID, **_SHORT, "linear_num_key_heads": 1, "linear_key_head_dim": 24, "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 2, "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 16,
        },
        {
            **_HYBRID, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts": 12,
            "tie_word_embeddings": True, "num_key_value_heads": 1,
        },
    ),
    "kimi_linear": (
        {**_KIMI, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        {
            **_KIMI, **_SHORT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "norm_topk_prob": False,
            "routed_scaling_factor": 1.7, "first_k_dense_replace": 0, "attention_bias": True,
            "linear_num_heads": 2, "linear_conv_kernel_dim": 3, "n_shared_experts": 1,
        },
        {
            **_KIMI, "num_hidden_layers": 5, "linear_head_dim": 8, "rms_norm_eps": 1e-3, "num_experts": 12,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
        },
    ),
    "bailing_hybrid": (
        {
            **_LING_3, "num_hidden_layers": 4, "layer_group_size": 2, "head_dim": 16, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 1, "kda_lower_bound": -0.5, "rope_theta": 1e4,
        },
        {
            **_LING_3, "layer_group_size": 3, "head_dim": 8, "q_lora_rank": 20, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": False, "routed_scaling_factor": 1.7, "attention_bias": True, "kda_safe_gate": False,
            "short_conv_kernel_size": 3, "n_shared_experts": 1, "first_k_dense_replace": 0, "rope_parameters": _MSCALE,
        },
        {
            **_LING_3, "num_hidden_layers": 3, "layer_types": _SHORT["layer_types"], "head_dim": 24, "n_group": 8,
            "topk_group": 3, "rms_norm_eps": 1e-3, "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "mixtral": (
        _LOCAL,
        {**_LOCAL, "sliding_window": 12, "num_key_value_heads": 4},
        {**_LOCAL, "head_dim": 24, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    ),
    "olmoe": (
        {**_LOCAL, "num_experts": 8, "clip_qkv": 0.6},
        {**_LOCAL, "num_experts": 8, "num_key_value_heads": 4, "norm_topk_prob": True, "attention_bias": True},
        {**_LOCAL, "num_experts": 12, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "deepseek_v2": (
        {
            **_LATENT, "q_lora_rank": 20, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy",
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
        },
        {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "rope_parameters": _MSCALE},
        {
            **_LATENT, "q_lora_rank": 20, "n_shared_experts": 1, "first_k_dense_replace": 2, "attention_bias": True,
            "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3": (
        {**_LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        {
            **_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.827, "rope_parameters": _MSCALE, "n_shared_experts": 1,
        },
        {
            **_LATENT, "q_lora_rank": 20, "n_group": 8, "topk_group": 3, "first_k_dense_replace": 2,
            "norm_topk_prob": False, "attention_bias": True, "rope_interleave": False, "tie_word_embeddings": True,
        },
    ),
    "glm4_moe": (
        {**_GLM, "use_qk_norm": True, "routed_scaling_factor": 2.5, "attention_bias": True},
        {**_GLM, "n_shared_experts": 1, "first_k_dense_replace": 0, "norm_topk_prob": False},
        {**_GLM, "n_group": 4, "topk_group": 2, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "glm4_moe_lite": (
        {**_LATENT, "q_lora_rank": 20, "n_shared_experts": 1, "num_key_value_heads": 4},
        {
            **_LATENT, "q_lora_rank": None, "n_group": 4, "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": _MSCALE,
        },
        {
            **_LATENT, "q_lora_rank": 20, "num_key_value_heads": 4, "rope_interleave": False, "norm_topk_prob": False,
            "rms_norm_eps": 1e-3, "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        {**_LOCAL, "head_dim": 16, "sliding_window": 12},
        {
            **_LOCAL, "head_dim": 32, "sliding_window": 20, "num_key_value_heads": 4, "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        {
            **_LOCAL, "head_dim": 16, "sliding_window": 12, "num_key_value_heads": 1, "num_experts_per_tok": 2,
            "tie_word_embeddings": True, "rope_parameters": {**_YARN, "truncate": True, "factor": 8.0},
        },
    ),
    "minimax_m2": (
        {**_LOCAL, "head_dim": 16, "rotary_dim": 8},
        {**_LOCAL, "head_dim": 32, "rotary_dim": 8, "num_key_value_heads": 4},
        {**_LOCAL, "head_dim": 16, "num_key_value_heads": 1, "num_local_experts": 12, "tie_word_embeddings": True},
    ),
    "ernie4_5_moe": (
        {
            "intermediate_size": 96, "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 3,
            "moe_num_shared_experts": 2, "num_key_value_heads": 2,
        },
        {
            "intermediate_size": 96, "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 3,
            "moe_num_shared_experts": 0, "num_key_value_heads": 4, "num_hidden_layers": 4, "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
        {
            "intermediate_size": 96, "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2,
            "moe_num_shared_experts": 1, "num_key_value_heads": 1, "moe_layer_start_index": 0,
            "moe_layer_end_index": 1, "moe_norm_min": 0.6,
        },
    ),
    "hunyuan_v1_moe": (
        {**_LOCAL, "num_experts": 8, "moe_topk": 3, "head_dim": 16, "attention_bias": True},
        {
            **_LOCAL, "num_experts": 8, "moe_topk": 2, "head_dim": 32, "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 1e4},
        },
        {
            **_LOCAL, "num_experts": 12, "moe_topk": [3, 3, 3], "head_dim": 16, "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe": (
        {
            **_LOCAL, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
        {**_LOCAL, "num_key_value_heads": 4, "attention_bias": True, "attention_multiplier": 0.3},
        {**_LOCAL, "num_key_value_heads": 1, "tie_word_embeddings": True, "logits_scaling": 0.5},
    ),
    "granitemoehybrid": (
        {
            **_GRANITE_4, "layers_block_type": ["linear_attention", "linear_attention", "full_attention"],
            "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 2.0,
            "tie_word_embeddings": True, "mamba_n_groups": 2,
        },
        {
            **_GRANITE_4, "layers_block_type": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4,
            "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_conv": 3, "mamba_conv_bias": False,
            "position_embedding_type": "rope", "attention_bias": True, "attention_multiplier": 0.3,
            "num_key_value_heads": 4,
        },
        {
            **_GRANITE_4, "layers_block_type": ["full_attention", "linear_attention", "linear_attention"],
            "mamba_n_groups": 4, "mamba_d_state": 16, "shared_intermediate_size": 32, "num_key_value_heads": 1,
            "tie_word_embeddings": True, "logits_scaling": 0.5,
        },
    ),
    "hy_v3": (
        _HY,
        {
            **_HY, "head_dim": 32, "num_key_value_heads": 4, "attention_bias": True, "num_shared_experts": 2,
            "router_scaling_factor": 1.7, "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        {**_HY, "num_key_value_heads": 1, "num_experts": 12, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "dots1": (
        {**_DOTS, "first_k_dense_replace": 1},
        {
            **_DOTS, "norm_topk_prob": False, "n_group": 4, "topk_group": 2, "attention_bias": True,
            "n_shared_experts": 2, "sliding_window": 12, "max_window_layers": 1, "num_key_value_heads": 4,
        },
        {
            **_DOTS, "head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "first_k_dense_replace": 2,
        },
    ),
    "solar_open": (
        _SOLAR,
        {
            **_SOLAR, "num_key_value_heads": 4, "head_dim": 32, "attention_bias": True, "norm_topk_prob": False,
            "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.7,
        },
        {**_SOLAR, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "deepseek_v32": (
        {**_INDEXED, "n_group": 4, "topk_group": 2},
        {**_INDEXED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rope_parameters": _MSCALE},
        {
            **_INDEXED, "index_topk": 512, "n_group": 8, "topk_group": 3, "attention_bias": True,
            "mlp_layer_types": ["dense", "sparse", "dense"], "norm_topk_prob": False, "tie_word_embeddings": True,
        },
    ),
    "glm_moe_dsa": (
        {**_INDEXED, "rms_norm_eps": 1e-3},
        {
            **_INDEXED, "indexer_types": ["full", "shared", "full"], "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 1.7, "first_k_dense_replace": 0, "attention_bias": True,
        },
        {
            **_INDEXED, "index_topk": 9, "index_topk_freq": 2, "index_skip_topk_offset": 1, "num_hidden_layers": 5,
            "n_shared_experts": 1, "norm_topk_prob": False, "tie_word_embeddings": True,
        },
    ),
    "mistral4": (
        {**_GROWING, "q_lora_rank": 20, "rope_parameters": _GROWN},
        {
            **_GROWING, "q_lora_rank": None, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
            "norm_topk_prob": False, "routed_scaling_factor": 1.7,
            "rope_parameters": {**_GROWN, "llama_4_scaling_beta": 0.3, "mscale": 0.7, "factor": 8.0},
        },
        {
            **_GROWING, "q_lora_rank": 20, "n_shared_experts": 1, "rope_interleave": False, "attention_bias": True,
            "tie_word_embeddings": True, "rope_parameters": {**_GROWN, "original_max_position_embeddings": 5},
        },
    ),
    "minimax_m3_vl_text": (
        {
            **_M3, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        {
            **_M3, "num_key_value_heads": 4, "swiglu_alpha": 1.3, "swiglu_limit": 1.5, "routed_scaling_factor": 1.7,
            "layer_types": ["minimax_m3_sparse"] * 3, "mlp_layer_types": ["sparse", "dense", "sparse"],
            "index_n_heads": 2, "index_block_size": 16, "index_topk_blocks": 3, "index_local_blocks": 2,
        },
        {
            **_M3, "num_key_value_heads": 1, "num_local_experts": 12, "tie_word_embeddings": True, "swiglu_limit": 0.7,
            "rotary_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            "index_head_dim": 32, "index_block_size": 5, "index_topk_blocks": 6,
        },
    ),
    "afmoe": (
        {**_TRINITY, "num_dense_layers": 1, "global_attn_every_n_layers": 2},
        {
            **_TRINITY, "num_dense_layers": 0, "head_dim": 32, "num_key_value_heads": 4, "attention_bias": True,
            "num_shared_experts": 2, "mup_enabled": False, "sliding_window": 20, "route_scale": 1.0,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        {
            **_TRINITY, "num_hidden_layers": 4, "num_dense_layers": 2, "num_key_value_heads": 1, "num_experts": 12,
            "tie_word_embeddings": True, "rope_parameters": _YARN,
        },
    ),
    "gemma4_text": (
        {**_GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        {
            **_GEMMA, "attention_k_eq_v": False, "num_key_value_heads": 4, "head_dim": 32, "global_head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": False,
            "rope_parameters": {"full_attention": _SHARED_ROPE, "sliding_attention": _SLIDING_ROPE},
        },
        {
            **_GEMMA, "num_hidden_layers": 4, "num_key_value_heads": 1, "num_global_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20, "num_experts": 12,
            "final_logit_softcapping": 1.5, "intermediate_size": 96, "use_bidirectional_attention": "vision",
        },
    ),
    "laguna": (
        {
            **_LAGUNA, "num_attention_heads_per_layer": [4, 8, 8],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        {
            **_LAGUNA, "gating": "per-element", "head_dim": 32, "num_key_value_heads": 4, "attention_bias": True,
            "mlp_layer_types": ["dense", "dense", "sparse"], "moe_routed_scaling_factor": 1.0,
            "shared_expert_intermediate_size": 48,
        },
        {
            **_LAGUNA, "num_hidden_layers": 4, "num_attention_heads_per_layer": [8, 4, 8, 4], "num_experts": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20, "num_key_value_heads": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "gating": "per-head",
            "tie_word_embeddings": True, "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0},
                "sliding_attention": {**_SLIDING_ROPE, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "mimo_v2_flash": (
        {**_MIMO, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {
            **_MIMO, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "v_head_dim": 40,
            "num_key_value_heads": 1, "attention_bias": True, "attention_value_scale": 1.3, "n_routed_experts": 16,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
            "mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": {
                "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {**_SLIDING_ROPE, "partial_rotary_factor": 1.0},
            },
        },
        {
            **_MIMO, "num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_attention_heads": 8, "head_dim": 16, "v_head_dim": 16, "attention_value_scale": None,
            "sliding_window": 20, "norm_topk_prob": False, "rms_norm_eps": 1e-3, "tie_word_embeddings": True,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {**_SLIDING_ROPE, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {**_SLIDING_ROPE, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "step3p5": (
        {
            **_STEP, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limits": [None, 0.4, None],
            "swiglu_limits_shared": [0.5, None, 0.3], "rope_parameters": {
                "full_attention": _LLAMA3, "sliding_attention": _SLIDING_ROPE,
            },
        },
        {
            **_STEP, "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "share_expert_dim": 48,
            "query_pre_attn_scalar": 4, "num_key_value_heads": 4, "moe_router_scaling_factor": 1.5,
            "swiglu_limits": [0.3, 0.0, 0.6], "rope_parameters": {"full_attention": _SLIDING_ROPE},
        },
        {
            **_STEP, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_attention_heads": 8, "num_sliding_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 20,
            "mlp_layer_types": ["sparse"] * 4, "n_routed_experts": 12, "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True, "swiglu_limits_shared": [0.0, 0.2, 0.4, 0.0], "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 5e3, "partial_rotary_factor": 0.5},
                "sliding_attention": {**_SLIDING_ROPE, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "bailing_moe_v2": (
        {**_LING, "num_key_value_heads": 2},
        {**_LING, "num_key_value_heads": 4, "partial_rotary_factor": 1.0, "use_qkv_bias": True, "use_bias": True},
        {
            **_LING, "num_key_value_heads": 1, "use_qk_norm": False, "n_group": 8, "topk_group": 3,
            "num_shared_experts": 2,
        },
    ),
    "nemotron_h": (
        _nemotron("MEM*EMEM*E", time_step_min=0.6, routed_scaling_factor=2.5),
        _nemotron(
            "M-M*E", moe_latent_size=24, num_experts_per_tok=6, n_groups=1, mamba_head_dim=24, conv_kernel=3,
            norm_topk_prob=False, n_group=4, topk_group=2, num_key_value_heads=4,
        ),
        _nemotron(
            "M*ME-E", mamba_num_heads=8, n_groups=4, ssm_state_size=8, use_conv_bias=False, num_key_value_heads=1,
            moe_latent_size=40, layer_norm_epsilon=1e-3, moe_shared_expert_intermediate_size=32,
        ),
    ),
}  # fmt: skip
"""What transformers' config class of a family is given, beside the sizes that all have."""


@dataclass(frozen=True)
class FamilyCase:
    """One tiny model: the family (transformers' model type), which of its three, and the config."""

    family: str
    variant: int
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.family}-{self.variant}"

    @property
    def has_index(self) -> bool:
        """True if an index chooses the tokens or blocks that a token sees."""
        return not {"index_topk", "index_topk_blocks"}.isdisjoint(self.config)

    @property
    def num_groups_of_mixers(self) -> int:
        """Number of groups of Mamba-2 layers, which tensor parallelism divides; 0 for other models."""
        default = 1 if self.family == "granitemoehybrid" else 0
        return self.config.get("n_groups", self.config.get("mamba_n_groups", default))


FAMILY_CASES = tuple(
    FamilyCase(family, variant, {**_SIZES, **config})
    for family, configs in FAMILY_CONFIGS.items()
    for variant, config in enumerate(configs)
)


def family_case(name: str) -> FamilyCase:
    """Return the case of a family and variant, such as `qwen3_moe-0`."""
    (found,) = [case for case in FAMILY_CASES if case.name == name]
    return found


def config_of(case: FamilyCase, **changes: Any) -> dict[str, Any]:
    """Return the `config.json` that transformers writes, or the case's own where it has no such class."""
    written = case.config
    if case.family in CONFIG_MAPPING:
        written = AutoConfig.for_model(case.family, **copy.deepcopy(case.config)).to_diff_dict()
    return {**written, "architectures": [getattr(families, case.family).ARCHITECTURE], **changes}


def write_family(case: FamilyCase, path: Path, *, seed: int, dtype: str = "float32", **changes: Any) -> Path:
    """Return a random model of a case, over the tokens of the core model, with `changes` of its `config.json`.

    Where logits are multiplied, smaller weights keep float32 as exact as the comparisons ask: with 0.15 granitemoe-2 is
    5.5e-5 away from float64 on one device, and with 0.07 as near as others.
    """
    config = config_of(replace(case, config={**case.config, "vocab_size": CORE_CONFIG.vocab_size}), **changes)
    scale = 0.07 if config.get("logits_scaling", 1.0) < 1 else 0.15
    return write_checkpoint(path, SyntheticModel(config, drawn=Drawn(scale, norm_jitter=0.2)), seed=seed, dtype=dtype)
