"""Granite MoE: multipliers of embeddings, residuals, scores and logits, and experts fused into a single tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, number_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, FactorSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, GRANITE_EXPERTS

ARCHITECTURE = "GraniteMoeForCausalLM"

CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **GRANITE_EXPERTS,
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(config, "granitemoe", hidden_act=("silu",))
    bias = flag_of(config, "attention_bias")
    return ModelSpec(
        family="granitemoe",
        **outline_of(config, norm_eps=1e-6, max_positions=2048),
        layers=layers_of(config, "gqa"),
        dense_intermediate_size=0,
        mixers=(
            GroupedAttention(
                **heads_of(config),
                bias=bias,
                output_bias=bias,
                score_scale=number_of(config, "attention_multiplier", 1.0),
                rope=rope_of(config, "granitemoe"),
            ),
        ),
        router=RouterSpec(
            num_experts=integer_of(config, "num_local_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=True,
        ),
        experts=ExpertSpec(integer_of(config, "intermediate_size"), layout="fused_out_in"),
        factors=FactorSpec(
            embedding_multiplier=number_of(config, "embedding_multiplier", 1.0),
            residual_multiplier=number_of(config, "residual_multiplier", 1.0),
            logits_divisor=number_of(config, "logits_scaling", 1.0),
        ),
    )
