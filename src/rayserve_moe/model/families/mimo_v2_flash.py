"""MiMo-V2-Flash: values narrower than keys, and layers with windows that have other KV heads, rotations and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import (
    attention_by_window,
    biased_sigmoid_router_of,
    first_layers_dense,
    heads_of,
    layer_flags_of,
    layers_of,
    outline_of,
    windows_of,
)
from rayserve_moe.model.config_rope import rope_of_type
from rayserve_moe.model.config_values import flag_of, integer_of, number_of, refuse_contradiction, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS, SELECTION_BIAS

ARCHITECTURE = "MiMoV2FlashForCausalLM"

CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **DENSE_MLP,
    **EXPERTS,
    **SELECTION_BIAS,
    "sinks": "model.layers.{layer}.self_attn.attention_sink_bias",
}
IGNORED = ("model.mtp.*",)
"""Prediction layers."""
EVERY = 6
"""Interval of layers without a window behind the first, unless the config lists them."""
ROTATED = 0.334
"""Rotated share of a head if the config has none."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = _with_layer_types(config)
    refuse_other_values(
        config,
        "mimo_v2_flash",
        hidden_act=("silu",),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
        n_shared_experts=(0,),
    )
    windows = windows_of(config, default=129, sliding=())
    layers = layers_of(config, "gqa", dense=first_layers_dense(config, default=1), windows=windows)
    eps = number_of(config, "layernorm_epsilon", 1e-5)
    return ModelSpec(
        family="mimo_v2_flash",
        **outline_of(config, norm_eps=eps, max_positions=131072),
        **attention_by_window(layers, *_attentions(config)),
        dense_intermediate_size=integer_of(config, "intermediate_size", 16384),
        router=biased_sigmoid_router_of(config, scale=1.0),
        experts=ExpertSpec(integer_of(config, "moe_intermediate_size", 2048)),
    )


def _with_layer_types(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with types of layers and the window as transformers writes them.

    Published files have flags of layers, and the number of positions that a window sees ahead of a token.
    """
    num_layers, found = integer_of(config, "num_hidden_layers"), {"partial_rotary_factor": ROTATED, **config}
    if config.get("hybrid_layer_pattern") is not None:
        flags = layer_flags_of(config, "hybrid_layer_pattern")
        found["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]
        refuse_contradiction(config, "layer_types", "hybrid_layer_pattern", found["layer_types"])
    elif config.get("layer_types") is None:
        is_sliding = (layer > 0 and (layer + 1) % EVERY > 0 for layer in range(num_layers))
        found["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in is_sliding]
    if config.get("moe_layer_freq") is not None:
        flags = layer_flags_of(config, "moe_layer_freq")
        found["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
        refuse_contradiction(config, "mlp_layer_types", "moe_layer_freq", found["mlp_layer_types"])
    if config.get("sliding_window_size") is not None:
        found["sliding_window"] = 1 + integer_of(config, "sliding_window_size")
    return found


def _attentions(config: Mapping[str, Any]) -> tuple[GroupedAttention, GroupedAttention]:
    """Return the attention of layers without and with a window."""
    heads = heads_of(config, head_dim=192)
    full = GroupedAttention(
        **heads,
        rope=None,
        value_dim=integer_of(config, "v_head_dim", 128),
        value_scale=_value_scale(config),
        bias=flag_of(config, "attention_bias"),
        sinks=flag_of(config, "add_full_attention_sink_bias"),
    )
    windowed = replace(
        full,
        num_heads=integer_of(config, "swa_num_attention_heads", full.num_heads),
        num_kv_heads=integer_of(config, "swa_num_key_value_heads", 2 * full.num_kv_heads),
        head_dim=integer_of(config, "swa_head_dim", full.head_dim),
        value_dim=integer_of(config, "swa_v_head_dim", full.value_width),
        sinks=flag_of(config, "add_swa_attention_sink_bias", True),
    )
    return _turned(full, config, "full_attention", theta=5e6), _turned(windowed, config, "sliding_attention", theta=1e4)


def _turned(own: GroupedAttention, config: Mapping[str, Any], kind: str, *, theta: float) -> GroupedAttention:
    """Return the attention of a type of layers with its rotation; `theta` is the default of the type."""
    key = "rope_theta" if kind == "full_attention" else "swa_rope_theta"
    default = {"rope_theta": number_of(config, key, theta)}
    return replace(own, rope=rope_of_type(config, "mimo_v2_flash", kind, head_dim=own.head_dim, default=default))


def _value_scale(config: Mapping[str, Any]) -> float:
    """Return the factor of values; null means 1."""
    key = "attention_value_scale"
    return 1.0 if key in config and config[key] is None else number_of(config, key, 0.707)
