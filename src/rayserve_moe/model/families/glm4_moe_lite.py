"""GLM-4.7-Flash: multi-head latent attention, with the router of GLM-4.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import (
    biased_sigmoid_router_of,
    first_layers_dense,
    latent_attention_of,
    outline_of,
)
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, refuse_other_values
from rayserve_moe.model.spec import ExpertSpec, ModelSpec
from rayserve_moe.model.tensor_names import (
    DECODER,
    DENSE_MLP,
    EXPERTS,
    LATENT_ATTENTION,
    SELECTION_BIAS,
    SHARED_EXPERTS,
)

ARCHITECTURE = "Glm4MoeLiteForCausalLM"

CHECKPOINT_RULES = DECODER | LATENT_ATTENTION | DENSE_MLP | EXPERTS | SELECTION_BIAS | SHARED_EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json`; UnsupportedModelError names the key and the value that this family does not compute."""
    refuse_other_values(
        config,
        "glm4_moe_lite",
        hidden_act=("silu",),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
    )
    width = integer_of(config, "moe_intermediate_size")
    return ModelSpec(
        family="glm4_moe_lite",
        **outline_of(config, norm_eps=1e-5, max_positions=202752),
        dense_layer_ids=first_layers_dense(config, default=1),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        attention=latent_attention_of(config),
        rope=rope_of(config, "glm4_moe_lite", interleaved=flag_of(config, "rope_interleave", True)),
        router=biased_sigmoid_router_of(config, scale=1.8),
        experts=ExpertSpec(width, shared="plain", shared_size=width * integer_of(config, "n_shared_experts", 1)),
    )
