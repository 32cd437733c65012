"""Qwen3-MoE: norms of q and k per head, and layers with experts at intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_between_dense, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS

ARCHITECTURE = "Qwen3MoeForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | DENSE_MLP | EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json`, in the spelling of the published files or of transformers 5.

    Raises: UnsupportedModelError with key and value for an unsupported feature, a missing key, or an excessive number;
    no other error.
    """
    refuse_other_values(config, "qwen3_moe", hidden_act=("silu",), use_sliding_window=(False,))
    bias = flag_of(config, "attention_bias")
    return ModelSpec(
        family="qwen3_moe",
        **outline_of(config, norm_eps=1e-6, max_positions=32768),
        layers=layers_of(config, "gqa", dense=layers_between_dense(config)),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(
            GroupedAttention(
                **heads_of(config), bias=bias, output_bias=bias, qk_norm="head", rope=rope_of(config, "qwen3_moe")
            ),
        ),
        router=RouterSpec(
            num_experts=integer_of(
                config, "num_local_experts" if config.get("num_local_experts") is not None else "num_experts"
            ),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=flag_of(config, "norm_topk_prob"),
        ),
        experts=ExpertSpec(integer_of(config, "moe_intermediate_size")),
    )
