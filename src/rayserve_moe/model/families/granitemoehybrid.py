"""Granite 4: Mamba-2 or attention, then experts beside a shared expert, with the multipliers of Granite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layer_types_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, number_of, refuse_other_values, with_shared_keys
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.mamba2 import Mamba2
from rayserve_moe.model.spec import ExpertSpec, FactorSpec, LayerSpec, ModelSpec, RouterSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, GRANITE_EXPERTS, MAMBA2

ARCHITECTURE = "GraniteMoeHybridForCausalLM"

_SHARED = "model.layers.{layer}.shared_mlp."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **GRANITE_EXPERTS,
    **MAMBA2,
    **dict.fromkeys(("shared_gate", "shared_up"), _SHARED + "input_linear.weight"),
    "shared_down": _SHARED + "output_linear.weight",
}
_MIXERS = {
    **dict.fromkeys(("mamba", "linear_attention"), "mamba2"),
    **dict.fromkeys(("attention", "full_attention"), "gqa"),
}
"""Mixer kind by layer type, as published files and as transformers spell it."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = {"layer_types": None, **with_shared_keys(config, {"layers_block_type": "layer_types"})}
    refuse_other_values(
        config,
        "granitemoehybrid",
        hidden_act=("silu",),
        mamba_proj_bias=(False,),
        position_embedding_type=("nope", "rope"),
        time_step_limit=([0.0, math.inf], [0.0, {"__float__": "Infinity"}]),
    )
    kinds = [_MIXERS[kind] for kind in layer_types_of(config, "layer_types", " ".join(_MIXERS))]
    if "gqa" not in kinds:
        raise UnsupportedModelError("config.json: layer_types has no attention: sequences would have no pages")
    bias = flag_of(config, "attention_bias")
    attention = GroupedAttention(
        **heads_of(config),
        bias=bias,
        output_bias=bias,
        score_scale=number_of(config, "attention_multiplier", 1.0),
        rope=rope_of(config, "granitemoehybrid") if config.get("position_embedding_type") == "rope" else None,
    )
    mixers = (attention, _mamba2_of(config))
    return ModelSpec(
        family="granitemoehybrid",
        **outline_of(config, norm_eps=1e-6, max_positions=2048),
        layers=tuple(LayerSpec(kind, "moe") for kind in kinds),
        dense_intermediate_size=0,
        mixers=tuple(own for own in mixers if own.kind in kinds),
        router=RouterSpec(
            num_experts=integer_of(config, "num_local_experts", 8),
            top_k=integer_of(config, "num_experts_per_tok", 2),
            renormalize=True,
        ),
        experts=ExpertSpec(
            integer_of(config, "intermediate_size", 11008),
            layout="fused_out_in",
            shared="plain",
            shared_size=integer_of(config, "shared_intermediate_size", 1024),
        ),
        factors=FactorSpec(
            embedding_multiplier=number_of(config, "embedding_multiplier", 1.0),
            residual_multiplier=number_of(config, "residual_multiplier", 1.0),
            logits_divisor=number_of(config, "logits_scaling", 1.0),
        ),
    )


def _mamba2_of(config: Mapping[str, Any]) -> Mamba2:
    """Read the Mamba-2 layers; the width of a head is a share of `mamba_expand` times the model's by default."""
    num_heads = integer_of(config, "mamba_n_heads", 128)
    inner = integer_of(config, "mamba_expand", 2) * integer_of(config, "hidden_size")
    head = {} if config.get("mamba_d_head") == "auto" else config
    return Mamba2(
        num_value_heads=num_heads,
        value_dim=integer_of(head, "mamba_d_head", max(1, inner // num_heads)),
        num_key_heads=integer_of(config, "mamba_n_groups", 1),
        key_dim=integer_of(config, "mamba_d_state", 256),
        num_taps=integer_of(config, "mamba_d_conv", 4),
        conv_bias=flag_of(config, "mamba_conv_bias", True),
        min_step=0.0,
    )
