"""GLM-4.5 to 4.7: rotation of half a head, and sigmoid scores with a selection bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import (
    biased_sigmoid_router_of,
    experts_of,
    first_layers_dense,
    heads_of,
    layers_of,
    outline_of,
)
from rayserve_moe.model.config_rope import rope_of, rotary_dim_of
from rayserve_moe.model.config_values import flag_of, integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS, SELECTION_BIAS, SHARED_EXPERTS

ARCHITECTURE = "Glm4MoeForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | DENSE_MLP | EXPERTS | SELECTION_BIAS | SHARED_EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "glm4_moe",
        hidden_act=("silu",),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
    )
    heads = heads_of(config)
    return ModelSpec(
        family="glm4_moe",
        **outline_of(config, norm_eps=1e-5, max_positions=131072),
        layers=layers_of(config, "gqa", dense=first_layers_dense(config, default=1)),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(
            GroupedAttention(
                **heads,
                bias=flag_of(config, "attention_bias"),
                qk_norm="head" if flag_of(config, "use_qk_norm") else "none",
                rope=rope_of(
                    config,
                    "glm4_moe",
                    rotary_dim=rotary_dim_of(config, heads["head_dim"], default=heads["head_dim"] // 2),
                ),
            ),
        ),
        router=biased_sigmoid_router_of(config, scale=1.0),
        experts=experts_of(config, "n_shared_experts", default=1),
    )
