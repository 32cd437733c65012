"""Arcee Trinity: gated attention that rotates in layers with windows only, and norms after every part of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import attention_by_window, experts_of, heads_of, layers_of, outline_of, windows_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import count_of, flag_of, integer_of, number_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import FactorSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS, OUTPUT_GATE, SHARED_EXPERTS

ARCHITECTURE = "AfmoeForCausalLM"

_LAYER = "model.layers.{layer}."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **OUTPUT_GATE,
    **DENSE_MLP,
    **EXPERTS,
    **SHARED_EXPERTS,
    "mlp_norm": _LAYER + "pre_mlp_layernorm.weight",
    "post_mixer_norm": _LAYER + "post_attention_layernorm.weight",
    "post_ffn_norm": _LAYER + "post_mlp_layernorm.weight",
    "router": _LAYER + "mlp.router.gate.weight",
    "selection_bias": _LAYER + "mlp.expert_bias",
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "afmoe",
        hidden_act=("silu",),
        score_func=("sigmoid",),
        n_group=(1,),
        topk_group=(1,),
        num_expert_groups=(1,),
        num_limited_groups=(1,),
    )
    outline = outline_of(config, norm_eps=1e-5, max_positions=16384)
    num_layers = integer_of(config, "num_hidden_layers")
    every = integer_of(config, "global_attn_every_n_layers", 4)
    sliding = tuple(layer for layer in range(num_layers) if (layer + 1) % every)
    layers = layers_of(
        config,
        "gqa",
        dense=range(count_of(config, "num_dense_layers", 1)),
        windows=windows_of(config, default=1024, sliding=sliding),
    )
    bias = flag_of(config, "attention_bias")
    windowed = GroupedAttention(
        **heads_of(config, head_dim=128),
        bias=bias,
        output_bias=bias,
        qk_norm="head",
        output_gate="sigmoid",
        rope=rope_of(config, "afmoe"),
    )
    return ModelSpec(
        family="afmoe",
        **outline,
        **attention_by_window(
            tuple(replace(layer, post_norms=True) for layer in layers), replace(windowed, rope=None), windowed
        ),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        router=RouterSpec(
            num_experts=integer_of(config, "num_experts", 64),
            top_k=integer_of(config, "num_experts_per_tok", 6),
            renormalize=flag_of(config, "route_norm", True),
            score="sigmoid",
            selection_bias=True,
            scale=number_of(config, "route_scale", 1.0),
        ),
        experts=experts_of(config, "num_shared_experts", default=2),
        factors=FactorSpec(
            embedding_multiplier=math.sqrt(outline["hidden_size"]) if flag_of(config, "mup_enabled") else 1.0
        ),
    )
