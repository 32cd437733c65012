"""Laguna: query heads and rotations by type of layer, softplus gates, and sigmoid scores with a selection bias."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import (
    attention_by_window,
    first_layers_dense,
    heads_of,
    layers_between_dense,
    layers_of,
    outline_of,
    windows_of,
)
from rayserve_moe.model.config_rope import rope_of_type
from rayserve_moe.model.config_values import flag_of, integer_of, number_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS, SHARED_EXPERTS, moved

ARCHITECTURE = "LagunaForCausalLM"

_LAYER = "model.layers.{layer}."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **DENSE_MLP,
    **EXPERTS,
    **moved(SHARED_EXPERTS, _LAYER + "mlp.shared_experts.", _LAYER + "mlp.shared_expert."),
    "output_gate": _LAYER + "self_attn.g_proj.weight",
    "selection_bias": _LAYER + "mlp.experts.e_score_correction_bias",
}
GATE_FORMS = {"per_head": "head", "per_element": "element"}
TYPES = (
    ("full_attention", {"rope_theta": 5e5, "partial_rotary_factor": 0.5}),
    ("sliding_attention", {"rope_theta": 1e4, "partial_rotary_factor": 1.0}),
)
"""Types of layers without and with a window, and their default rotation."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "laguna",
        hidden_act=("silu",),
        gating=(True, "per-head", "per-element"),
        qkv_bias=(False,),
        swa_attention_sink_enabled=(False,),
        moe_apply_router_weight_on_input=(False,),
        moe_router_logit_softcapping=(0,),
        moe_router_use_sigmoid=(True,),
    )
    windows = windows_of(config, default=512, sliding=())
    follows_list = config.get("mlp_layer_types") is None and config.get("mlp_only_layers") is not None
    dense = layers_between_dense(config) if follows_list else first_layers_dense(config, default=1)
    return ModelSpec(
        family="laguna",
        **outline_of(config, norm_eps=1e-6, max_positions=131072),
        **attention_by_window(layers_of(config, "gqa", dense=dense, windows=windows), *_attentions(config, windows)),
        dense_intermediate_size=integer_of(config, "intermediate_size", 8192),
        router=RouterSpec(
            num_experts=integer_of(config, "num_experts", 256),
            top_k=integer_of(config, "num_experts_per_tok", 8),
            renormalize=flag_of(config, "norm_topk_prob", True),
            score="sigmoid",
            selection_bias=True,
            scale=number_of(config, "moe_routed_scaling_factor", 1.0),
        ),
        experts=ExpertSpec(
            integer_of(config, "moe_intermediate_size", 512),
            shared="plain",
            shared_size=integer_of(config, "shared_expert_intermediate_size", 512),
        ),
    )


def _attentions(config: Mapping[str, Any], windows: Sequence[int]) -> tuple[GroupedAttention, GroupedAttention]:
    """Return the attention of layers without and with a window; equal if all layers are of a type."""
    bias = flag_of(config, "attention_bias")
    unrotated = GroupedAttention(
        **heads_of({"num_attention_heads": 48, "num_key_value_heads": 8, **config}, head_dim=128),
        bias=bias,
        output_bias=bias,
        qk_norm="head",
        output_gate="softplus",
        gate_form=_gate_form(config),
        rope=None,
    )
    counts, found = _query_heads(config, windows), []
    for has_window in sorted({window > 0 for window in windows or (0,)}):
        kind, default = TYPES[has_window]
        rope = rope_of_type(config, "laguna", kind, head_dim=unrotated.head_dim, default=default)
        found.append(replace(unrotated, num_heads=counts[has_window], rope=rope))
    return found[0], found[-1]


def _query_heads(config: Mapping[str, Any], windows: Sequence[int]) -> tuple[int, int]:
    """Return the query heads of layers without and with a window.

    Raises: UnsupportedModelError if layers of the same type differ.
    """
    key, shared = "num_attention_heads_per_layer", integer_of(config, "num_attention_heads", 48)
    num_layers, listed = integer_of(config, "num_hidden_layers"), config.get(key)
    if listed is None:
        return shared, shared
    is_list = isinstance(listed, list | tuple) and len(listed) == num_layers
    pairs = list(zip(listed, windows or (0,) * num_layers, strict=True)) if is_list else []
    full, windowed = ([count for count, window in pairs if (window > 0) is wanted] for wanted in (False, True))
    if not pairs or any(count != counts[0] for counts in (full, windowed) for count in counts):
        raise UnsupportedModelError(
            f"config.json: {key} must give each layer its query heads, equally many to layers of the same type, "
            f"found {reprlib.repr(listed)}"
        )
    firsts = ((counts or [shared])[0] for counts in (full, windowed))
    first, second = (integer_of({key: count}, key) for count in firsts)
    return first, second


def _gate_form(config: Mapping[str, Any]) -> str:
    """Return the form of the gates, by `gating_types` of layers, else by `gating`.

    Raises: UnsupportedModelError if layers differ, or for another form.
    """
    types = config.get("gating_types")
    if types is None:
        return "element" if config.get("gating") == "per-element" else "head"
    found = {str(kind).replace("-", "_") for kind in types} if isinstance(types, list | tuple) else set()
    if len(found) != 1 or not found <= GATE_FORMS.keys():
        raise UnsupportedModelError(
            f"config.json: gating_types = {reprlib.repr(types)} is not supported for laguna "
            "(only per_head or per_element, the same in all layers)"
        )
    return GATE_FORMS[found.pop()]
