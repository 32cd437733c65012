"""OLMoE: norms over the whole projections of q and k, and bounds on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, number_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, EXPERTS

ARCHITECTURE = "OlmoeForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(config, "olmoe", hidden_act=("silu",))
    bias = flag_of(config, "attention_bias")
    return ModelSpec(
        family="olmoe",
        **outline_of(config, norm_eps=1e-5, max_positions=4096),
        layers=layers_of(config, "gqa"),
        dense_intermediate_size=0,
        mixers=(
            GroupedAttention(
                **heads_of(config),
                bias=bias,
                output_bias=bias,
                qk_norm="full",
                clip_qkv=None if config.get("clip_qkv") is None else number_of(config, "clip_qkv", 0.0),
                rope=rope_of(config, "olmoe"),
            ),
        ),
        router=RouterSpec(
            num_experts=integer_of(config, "num_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=flag_of(config, "norm_topk_prob"),
        ),
        experts=ExpertSpec(integer_of(config, "intermediate_size")),
    )
