"""Step 3.5 and the language model of Step 3.7: heads and rotations by type of layer, and activations with limits."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import (
    attention_by_window,
    first_layers_dense,
    heads_of,
    layer_types_of,
    layers_of,
    outline_of,
    windows_of,
    with_limits,
)
from rayserve_moe.model.config_rope import rope_of_type
from rayserve_moe.model.config_values import (
    flag_of,
    integer_of,
    number_of,
    object_of,
    refuse_contradiction,
    refuse_other_values,
    text_config_of,
)
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, SHARED_EXPERTS, moved

ARCHITECTURE = "Step3p5ForCausalLM"
OTHER_ARCHITECTURES = ("Step3p7ForConditionalGeneration",)
"""The multimodal model, whose language model alone is served."""

_LAYER = "model.layers.{layer}."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **DENSE_MLP,
    **moved(SHARED_EXPERTS, _LAYER + "mlp.shared_experts.", _LAYER + "share_expert."),
    "output_gate": _LAYER + "self_attn.g_proj.weight",
    "router": _LAYER + "moe.gate.weight",
    "selection_bias": _LAYER + "moe.router_bias",
    "expert_gate": _LAYER + "moe.gate_proj.weight",
    "expert_up": _LAYER + "moe.up_proj.weight",
    "expert_down": _LAYER + "moe.down_proj.weight",
}
IGNORED = ("vision_model.*", "vit_large_projector.*")
"""Images are refused."""
SPELLINGS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
"""Keys of published files, and the keys that transformers writes instead."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = _in_one_spelling(text_config_of(config))
    refuse_other_values(
        config,
        "step3p5",
        hidden_act=("silu",),
        gating=(True, "per-head"),
        moe_router_activation=("sigmoid",),
        use_moe_router_bias=(True,),
        use_head_wise_attn_gate=(True,),
        use_qk_norm=(True,),
        zero_centered=(True,),
        sink=(False,),
        mlp_bias=(False,),
        use_bidirectional_attention=(False,),
        att_impl_type=("GQA",),
        use_rope_layers=([],),
    )
    windows = windows_of(config, default=512, sliding=())
    layers = layers_of(config, "gqa", dense=first_layers_dense(config, default=3), windows=windows)
    layers = with_limits(layers, config, experts="swiglu_limits", mlp="swiglu_limits_shared")
    return ModelSpec(
        family="step3p5",
        **outline_of(config, norm_eps=1e-5, max_positions=128000),
        **attention_by_window(layers, *_attentions(config, {layer.window > 0 for layer in layers})),
        dense_intermediate_size=integer_of(config, "intermediate_size", 11264),
        router=RouterSpec(
            num_experts=integer_of(config, "n_routed_experts", 288),
            top_k=integer_of(config, "num_experts_per_tok", 8),
            renormalize=flag_of(config, "norm_expert_weight", True),
            score="sigmoid",
            selection_bias=True,
            scale=number_of(config, "moe_router_scaling_factor", 1.0),
        ),
        experts=ExpertSpec(
            integer_of(config, "moe_intermediate_size", 1280),
            layout="stacked",
            shared="plain",
            shared_size=integer_of(config, "share_expert_dim", 1280),
        ),
        norm_offset=1.0,
    )


def _in_one_spelling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the keys that transformers writes; lists of layers may go on with prediction layers."""
    found = dict(config)
    for old, new in SPELLINGS.items():
        if config.get(old) is not None:
            found[new] = integer_of(config, old)
            refuse_contradiction(config, new, old, found[new])
    if config.get("moe_layers_enum") is not None:
        sparse = _layers_in(config["moe_layers_enum"])
        num_layers = integer_of(config, "num_hidden_layers")
        found["mlp_layer_types"] = ["sparse" if layer in sparse else "dense" for layer in range(num_layers)]
        refuse_contradiction(config, "mlp_layer_types", "moe_layers_enum", found["mlp_layer_types"])
    if found.get("num_sliding_attention_heads") is None:
        other = object_of(config, "attention_other_setting")
        found["num_sliding_attention_heads"] = other.get("num_attention_heads")
        for key, name in (("num_attention_groups", "num_key_value_heads"), ("head_dim", "head_dim")):
            if other.get(key) not in (None, found.get(name)):
                raise UnsupportedModelError(
                    f"config.json: {key} = {reprlib.repr(other[key])} of attention_other_setting is not supported for "
                    f"step3p5 (only {found.get(name)!r}, as in the other layers)"
                )
    return found


def _layers_in(listed: Any) -> set[int]:
    """Return the layers of a list, or of a string with commas."""
    names = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(names, list) or not all(str(name).strip().isdecimal() for name in names):
        raise UnsupportedModelError(f"config.json: moe_layers_enum must list layers, found {reprlib.repr(listed)}")
    return {int(name) for name in names}


def _attentions(config: Mapping[str, Any], kinds: set[bool]) -> tuple[GroupedAttention, GroupedAttention]:
    """Return the attention of layers without and with a window; equal if all layers are of a type.

    `kinds` has True if any layer has a window, and False if any has none.
    """
    bias = flag_of(config, "attention_bias")
    heads = heads_of({"num_key_value_heads": 8, **config}, head_dim=128)
    scalar = number_of(config, "query_pre_attn_scalar", heads["head_dim"])
    full = GroupedAttention(
        **heads,
        rope=None,
        bias=bias,
        output_bias=bias,
        qk_norm="head",
        score_scale=None if scalar == heads["head_dim"] else scalar**-0.5,
        output_gate="sigmoid",
        gate_form="head",
    )
    found = []
    for has_window in sorted(kinds):
        kind = "sliding_attention" if has_window else "full_attention"
        key = "num_sliding_attention_heads" if has_window else "num_attention_heads"
        num_heads = integer_of(config, key, full.num_heads)
        own, default = _rotation_of(config, kind)
        rope = rope_of_type(own, "step3p5", kind, head_dim=full.head_dim, default=default)
        found.append(replace(full, num_heads=num_heads, rope=rope))
    return found[0], found[-1]


def _rotation_of(config: Mapping[str, Any], kind: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the config without rotations of layers, and the rotation of a type of layers in published files.

    They have thetas and rotated shares by layer, and a scaling for the types in `yarn_only_types`.
    """
    types = [] if config.get("layer_types") is None else layer_types_of(config, "layer_types", _KINDS)
    layer = types.index(kind) if kind in types else 0
    found: dict[str, Any] = {"rope_theta": _of_layer(config, "rope_theta", layer, default=10000.0)}
    found["partial_rotary_factor"] = _of_layer(config, "partial_rotary_factors", layer, default=1.0)
    scaled = ["full_attention"] if config.get("yarn_only_types") is None else config["yarn_only_types"]
    if not isinstance(scaled, list) or any(each not in _KINDS.split() for each in scaled):
        raise UnsupportedModelError(
            f"config.json: yarn_only_types must list types of layers ({_KINDS}), found {reprlib.repr(scaled)}"
        )
    if kind in scaled:
        found |= object_of(config, "rope_scaling")
    return {**config, "rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None}, found


_KINDS = "full_attention sliding_attention"


def _of_layer(config: Mapping[str, Any], key: str, layer: int, *, default: float) -> Any:
    """Return the value of a layer at `key`: one for all, or a list of layers."""
    found = config.get(key)
    if not isinstance(found, list):
        return default if found is None else found
    if len(found) <= layer:
        raise UnsupportedModelError(f"config.json: {key} must give each layer a number, found {reprlib.repr(found)}")
    return found[layer]
