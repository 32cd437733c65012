"""Ling 2.0: q, k and v in a single tensor, and sigmoid scores with a selection bias within groups."""

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
from rayserve_moe.model.config_rope import rope_of, rotary_dim_of
from rayserve_moe.model.config_values import flag_of, integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import DECODER, DENSE_MLP, EXPERTS, SHARED_EXPERTS

ARCHITECTURE = "BailingMoeV2ForCausalLM"

_LAYER = "model.layers.{layer}."
CHECKPOINT_RULES = {
    **DECODER,
    **DENSE_MLP,
    **EXPERTS,
    **SHARED_EXPERTS,
    "embedding": "model.word_embeddings.weight",
    **dict.fromkeys(("q", "k", "v"), _LAYER + "attention.query_key_value.weight"),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), _LAYER + "attention.query_key_value.bias"),
    "o": _LAYER + "attention.dense.weight",
    "o_bias": _LAYER + "attention.dense.bias",
    "q_norm": _LAYER + "attention.query_layernorm.weight",
    "k_norm": _LAYER + "attention.key_layernorm.weight",
    "selection_bias": _LAYER + "mlp.gate.expert_bias",
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "bailing_moe_v2",
        hidden_act=("silu",),
        norm_topk_prob=(True,),
        score_function=("sigmoid",),
        moe_router_enable_expert_bias=(True,),
        use_rmsnorm=(True,),
        norm_head=(False,),
        norm_softmax=(False,),
    )
    heads = heads_of(config)
    router = biased_sigmoid_router_of(config, scale=1.0, groups=(8, 4), experts="num_experts")
    return ModelSpec(
        family="bailing_moe_v2",
        **outline_of(config, norm_eps=1e-6, max_positions=32768),
        layers=layers_of(config, "gqa", dense=first_layers_dense(config, default=1)),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(
            GroupedAttention(
                **heads,
                bias=flag_of(config, "use_qkv_bias"),
                output_bias=flag_of(config, "use_bias"),
                qk_norm="head" if flag_of(config, "use_qk_norm", True) else "none",
                fused_qkv=True,
                rope=rope_of(
                    config,
                    "bailing_moe_v2",
                    theta=6e5,
                    rotary_dim=rotary_dim_of(config, heads["head_dim"], default=heads["head_dim"]),
                ),
            ),
        ),
        # With a single expert per token, its weight is its score.
        router=replace(router, renormalize=router.top_k > 1),
        experts=experts_of(config, "num_shared_experts", default=1),
    )
