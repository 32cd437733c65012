"""Qwen2-MoE: biases of q, k and v, and a shared expert behind a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_between_dense, layers_of, outline_of, windows_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import count_of, flag_of, integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS, GATED_SHARED_EXPERT

ARCHITECTURE = "Qwen2MoeForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | DENSE_MLP | EXPERTS | GATED_SHARED_EXPERT


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(config, "qwen2_moe", hidden_act=("silu",))
    return ModelSpec(
        family="qwen2_moe",
        **outline_of(config, norm_eps=1e-6, max_positions=32768),
        layers=layers_of(config, "gqa", dense=layers_between_dense(config), windows=_windows(config)),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(
            GroupedAttention(
                **heads_of(config), bias=flag_of(config, "qkv_bias", True), rope=rope_of(config, "qwen2_moe")
            ),
        ),
        router=RouterSpec(
            num_experts=integer_of(config, "num_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=flag_of(config, "norm_topk_prob"),
        ),
        experts=ExpertSpec(
            integer_of(config, "moe_intermediate_size"),
            shared="sigmoid_gated",
            shared_size=integer_of(config, "shared_expert_intermediate_size"),
        ),
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    if not flag_of(config, "use_sliding_window"):
        return ()
    # Every other layer, from the first on, below `max_window_layers`.
    return windows_of(config, default=4096, sliding=tuple(range(0, count_of(config, "max_window_layers", 28), 2)))
