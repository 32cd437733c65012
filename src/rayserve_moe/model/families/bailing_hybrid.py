"""Ling 3.0: Kimi delta layers with bounded decays, and gated latent attention in the last layer of each group."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.kernels.reference.delta_gates import GateRule
from rayserve_moe.model.config_parts import (
    biased_sigmoid_router_of,
    experts_of,
    first_layers_dense,
    hybrid_layers_of,
    latent_attention_of,
    outline_of,
    with_limits,
)
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import (
    KIMI_KEYS,
    MAX_NUMBER,
    flag_of,
    integer_of,
    refuse_other_values,
    with_shared_keys,
)
from rayserve_moe.model.layers.kimi_delta import KimiDelta
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import (
    DECODER,
    DENSE_MLP,
    EXPERTS,
    KIMI_DELTA,
    LATENT_ATTENTION,
    SHARED_EXPERTS,
    moved,
)

ARCHITECTURE = "BailingHybridForCausalLM"
OTHER_ARCHITECTURES = ("BailingMoeV3ForCausalLM",)
"""The name in published files. transformers writes the first one."""

_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "attention."
CHECKPOINT_RULES = {
    **DECODER,
    **moved(LATENT_ATTENTION | KIMI_DELTA, _LAYER + "self_attn.", _ATTENTION),
    **DENSE_MLP,
    **EXPERTS,
    **SHARED_EXPERTS,
    "embedding": "model.word_embeddings.weight",
    "o": _ATTENTION + "dense.weight",
    "o_bias": _ATTENTION + "dense.bias",
    "output_gate": _ATTENTION + "g_proj.weight",
    "kda_a": _ATTENTION + "f_proj.weight",
    "kda_z": _ATTENTION + "g_proj.weight",
    "selection_bias": _LAYER + "mlp.gate.expert_bias",
}
OTHER_RULES = (CHECKPOINT_RULES | {"kda_out": CHECKPOINT_RULES["o"]},)
"""transformers writes the outputs of both mixers under one name."""
PREDICTION_TENSORS = {"draft_norm": "final_layernorm.weight"}
_SHARED_KEYS = {
    **KIMI_KEYS,
    "layer_group_size": "full_attention_interval",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = {"q_lora_rank": None, "full_attention_interval": 6, **with_shared_keys(config, _SHARED_KEYS)}
    refuse_other_values(
        config,
        "bailing_hybrid",
        hidden_act=("silu",),
        score_function=("sigmoid",),
        scoring_func=("sigmoid",),
        moe_router_enable_expert_bias=(True,),
        rope_interleave=(True,),
        tie_word_embeddings=(False,),
        gated_attention_proj_granularity_type=("head_wise",),
        no_kda_lora=(True,),
        use_mla_nope=(False,),
        value_norm=(False,),
        up_proj_norm=(False,),
        scale_router_input=(False,),
    )
    layers = hybrid_layers_of(config, linear="kimi_delta", full="mla", dense=first_layers_dense(config, default=2))
    layers = with_limits(layers, config, experts="expert_swiglu_limit_list", mlp="share_expert_swiglu_limit_list")
    kinds = {layer.mixer for layer in layers}
    # `partial_rotary_factor` is the share of `head_dim` that `qk_rope_head_dim` is: all of these elements are rotated.
    width = integer_of(config, "qk_rope_head_dim")
    rope = rope_of(config, "bailing_hybrid", theta=6e6, rotary_dim=width, interleaved=True)
    attention = latent_attention_of(config, rope=replace(rope, rotary_dim=None))
    delta = KimiDelta(
        num_heads=integer_of(config, "linear_num_heads", integer_of(config, "num_attention_heads")),
        head_dim=integer_of(config, "linear_head_dim", integer_of(config, "head_dim", 128)),
        num_taps=integer_of(config, "linear_conv_kernel_dim", 4),
        gates=GateRule(output="sigmoid", decay_floor=_decay_floor_of(config), rounds_decays=True),
    )
    mixers = (replace(attention, output_gate="sigmoid"), delta)
    return ModelSpec(
        family="bailing_hybrid",
        **outline_of(config, norm_eps=1e-6, max_positions=262144),
        layers=layers,
        dense_intermediate_size=integer_of(config, "intermediate_size", 6144),
        mixers=tuple(own for own in mixers if own.kind in kinds),
        router=biased_sigmoid_router_of(config, scale=2.5, groups=(8, 4), experts="num_experts"),
        experts=experts_of(config, "n_shared_experts", default=1),
    )


def _decay_floor_of(config: Mapping[str, Any]) -> float:
    """Return the bound of the logarithms of decays, 0 for none.

    Raises: UnsupportedModelError if the bound is not a negative number.
    """
    if not flag_of(config, "kda_safe_gate", True):
        return 0.0
    found = config.get("kda_lower_bound", -5.0)
    if type(found) not in (int, float) or not -MAX_NUMBER <= found < 0:
        raise UnsupportedModelError(
            f"config.json: kda_lower_bound must be a negative number, found {reprlib.repr(found)}"
        )
    return float(found)
