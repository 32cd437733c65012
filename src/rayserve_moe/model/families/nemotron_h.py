"""Nemotron-3 Nano and Super: each layer is one of Mamba-2, attention, an MLP or experts; no rotation and no gates."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import biased_sigmoid_router_of, heads_of, outline_of
from rayserve_moe.model.config_values import count_of, flag_of, integer_of, number_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.mamba2 import Mamba2
from rayserve_moe.model.spec import NO_PART, ExpertSpec, LayerSpec, ModelSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import MAMBA2, moved

ARCHITECTURE = "NemotronHForCausalLM"

_LAYER = "backbone.layers.{layer}."
_MIXER = _LAYER + "mixer."
CHECKPOINT_RULES = {
    "embedding": "backbone.embeddings.weight",
    "final_norm": "backbone.norm_f.weight",
    "head": "lm_head.weight",
    **dict.fromkeys(("attention_norm", "mlp_norm"), _LAYER + "norm.weight"),
    **{part: f"{_MIXER}{part}_proj.weight" for part in "qkvo"},
    **moved(MAMBA2, "model.layers.{layer}.mamba.", _MIXER),
    "router": _MIXER + "gate.weight",
    "selection_bias": _MIXER + "gate.e_score_correction_bias",
    "latent_in": _MIXER + "fc1_latent_proj.weight",
    "latent_out": _MIXER + "fc2_latent_proj.weight",
    **{f"expert_{part}": f"{_MIXER}experts.{{expert}}.{part}_proj.weight" for part in ("up", "down")},
    **{f"shared_{part}": f"{_MIXER}shared_experts.{part}_proj.weight" for part in ("up", "down")},
    **{f"dense_{part}": f"{_MIXER}{part}_proj.weight" for part in ("up", "down")},
}
_PREDICTED = (
    "router",
    "selection_bias",
    "latent_in",
    "latent_out",
    "expert_up",
    "expert_down",
    "shared_up",
    "shared_down",
)
PREDICTION_RULES = (
    {
        **moved({role: CHECKPOINT_RULES[role] for role in ("q", "k", "v", "o")}, _LAYER, "mtp.layers.0."),
        **moved({role: CHECKPOINT_RULES[role] for role in _PREDICTED}, _LAYER, "mtp.layers.1."),
        **{
            role: f"mtp.layers.0.{name}.weight"
            for role, name in {
                "embedding_norm": "enorm",
                "hidden_norm": "hnorm",
                "fc": "eh_proj",
                "attention_norm": "norm",
            }.items()
        },
        "mlp_norm": "mtp.layers.1.norm.weight",
        "draft_norm": "mtp.layers.1.final_layernorm.weight",
    },
)
"""Attention, then experts (`mtp_hybrid_override_pattern` "*E"), each in a layer of its own."""
IGNORED = ("mtp.*",)

_LAYERS = {
    "M": LayerSpec("mamba2", NO_PART),
    "*": LayerSpec("gqa", NO_PART),
    "E": LayerSpec(NO_PART, "moe"),
    "-": LayerSpec(NO_PART, "dense"),
}
_TYPES = {
    **dict.fromkeys(("mamba", "linear_attention"), "M"),
    **dict.fromkeys(("attention", "full_attention"), "*"),
    "moe": "E",
    "mlp": "-",
}
"""Letter of each type of layer, in both spellings of a type."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "nemotron_h",
        mlp_hidden_act=("relu2",),
        mamba_hidden_act=("silu",),
        attention_bias=(False,),
        mlp_bias=(False,),
        use_bias=(False,),
        mamba_proj_bias=(False,),
        tie_word_embeddings=(False,),
        residual_in_fp32=(False,),
        n_shared_experts=(1,),
    )
    layers = _layers_of(config)
    outline = outline_of(config, norm_eps=1e-5, max_positions=4096)
    outline["norm_eps"] = number_of(config, "layer_norm_epsilon", 1e-5)
    mixers = GroupedAttention(**heads_of(config, head_dim=128), rope=None), _mamba2_of(config)
    return ModelSpec(
        family="nemotron_h",
        **outline,
        layers=layers,
        dense_intermediate_size=integer_of(config, "intermediate_size", 21504) if _LAYERS["-"] in layers else 0,
        mixers=tuple(own for own in mixers if own.kind in {layer.mixer for layer in layers}),
        router=biased_sigmoid_router_of(config, scale=1.0),
        experts=ExpertSpec(
            integer_of(config, "moe_intermediate_size", 7688),
            activation="relu2",
            shared="plain",
            shared_size=integer_of(config, "moe_shared_expert_intermediate_size", 7688),
            latent_size=count_of(config, "moe_latent_size", 0),
        ),
    )


def _layers_of(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Return the layers by `layers_block_type`, else by the letters of `hybrid_override_pattern`.

    `num_hidden_layers` is not read.
    """
    key = "hybrid_override_pattern" if config.get("layers_block_type") is None else "layers_block_type"
    found = config.get(key)
    types = found if isinstance(found, list | str) else []
    letters = [_TYPES.get(each) if key == "layers_block_type" else each for each in types if isinstance(each, str)]
    if not letters or len(letters) != len(types) or any(letter not in _LAYERS for letter in letters):
        known = "".join(_LAYERS) if key == "hybrid_override_pattern" else ", ".join(_TYPES)
        raise UnsupportedModelError(
            f"config.json: {key} must give each layer one of {known}, found {reprlib.repr(found)}"
        )
    layers = tuple(_LAYERS[letter] for letter in letters if letter)
    if _LAYERS["*"] not in layers:
        raise UnsupportedModelError(f"config.json: {key} has no layer with attention, and sequences have no pages")
    return layers


def _mamba2_of(config: Mapping[str, Any]) -> Mamba2:
    """Read the Mamba-2 layers. Prompts and single tokens have the same lower bound of steps."""
    return Mamba2(
        num_value_heads=integer_of(config, "mamba_num_heads", 128),
        value_dim=integer_of(config, "mamba_head_dim", 64),
        num_key_heads=integer_of(config, "n_groups", 8),
        key_dim=integer_of(config, "ssm_state_size", 128),
        num_taps=integer_of(config, "conv_kernel", 4),
        conv_bias=flag_of(config, "use_conv_bias", True),
        min_step=number_of(config, "time_step_min", 0.001),
    )
