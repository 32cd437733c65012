"""Hy3: grouped attention with norms of heads, and sigmoid scores with a selection bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import (
    biased_sigmoid_router_of,
    experts_of,
    first_layers_dense,
    heads_of,
    layers_of,
    outline_of,
)
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, number_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS, SHARED_EXPERTS, moved

ARCHITECTURE = "HYV3ForCausalLM"

_MLP = "model.layers.{layer}.mlp."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **DENSE_MLP,
    **EXPERTS,
    **moved(SHARED_EXPERTS, _MLP + "shared_experts.", _MLP + "shared_mlp."),
    "router": _MLP + "router.gate.weight",
    "selection_bias": _MLP + "expert_bias",
}
PREDICTION_TENSORS = {"draft_norm": "final_layernorm.weight"}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "hy_v3",
        hidden_act=("silu",),
        mlp_bias=(False,),
        qk_norm=(True,),
        moe_router_use_sigmoid=(True,),
        route_norm=(True,),
        norm_topk_prob=(True,),
    )
    router = biased_sigmoid_router_of(config, scale=1.0, experts="num_experts")
    return ModelSpec(
        family="hy_v3",
        # The published file names no dtype; its tensors are bfloat16.
        **outline_of(config, norm_eps=1e-5, max_positions=131072, dtype="bfloat16"),
        layers=layers_of(config, "gqa", dense=first_layers_dense(config, default=1)),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(
            GroupedAttention(
                **heads_of(config, head_dim=128),
                bias=flag_of(config, "attention_bias"),
                output_bias=flag_of(config, "attention_bias"),
                qk_norm="head",
                rope=rope_of(config, "hy_v3", theta=11158840.0),
            ),
        ),
        router=replace(router, scale=number_of(config, "router_scaling_factor", 2.826)),
        experts=experts_of(config, "num_shared_experts", default=1),
    )
