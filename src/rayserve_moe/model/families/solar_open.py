"""Solar Open: grouped attention without norms of heads, and the router of DeepSeek-V3 in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import biased_sigmoid_router_of, experts_of, heads_of, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, EXPERTS, SELECTION_BIAS, SHARED_EXPERTS

ARCHITECTURE = "SolarOpenForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | EXPERTS | SELECTION_BIAS | SHARED_EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "solar_open",
        hidden_act=("silu",),
        use_qk_norm=(False,),
        first_k_dense_replace=(0,),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
    )
    return ModelSpec(
        family="solar_open",
        **outline_of(config, norm_eps=1e-5, max_positions=131072),
        layers=layers_of(config, "gqa"),
        dense_intermediate_size=0,
        mixers=(
            GroupedAttention(
                **heads_of(config, head_dim=128),
                bias=flag_of(config, "attention_bias"),
                rope=rope_of(config, "solar_open", theta=1e6),
            ),
        ),
        router=biased_sigmoid_router_of(config, scale=1.0),
        experts=experts_of(config, "n_shared_experts", default=1),
    )
