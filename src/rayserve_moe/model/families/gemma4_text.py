"""Gemma 4 MoE, the language model only: heads by type of layer, keys as values, and an MLP beside the experts."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import attention_by_window, layers_of, outline_of, windows_of
from rayserve_moe.model.config_rope import rope_of_type
from rayserve_moe.model.config_values import (
    amount_of,
    flag_of,
    integer_of,
    object_of,
    refuse_other_values,
    text_config_of,
)
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, FactorSpec, ModelSpec, RouterSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, in_language_model

ARCHITECTURE = "Gemma4ForCausalLM"
OTHER_ARCHITECTURES = ("Gemma4ForConditionalGeneration",)
"""The multimodal model, whose language model alone is served."""

_LAYER = "model.layers.{layer}."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    "post_mixer_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_norm": _LAYER + "pre_feedforward_layernorm.weight",
    "experts_norm": _LAYER + "pre_feedforward_layernorm_2.weight",
    "post_shared_norm": _LAYER + "post_feedforward_layernorm_1.weight",
    "post_experts_norm": _LAYER + "post_feedforward_layernorm_2.weight",
    "post_ffn_norm": _LAYER + "post_feedforward_layernorm.weight",
    "layer_scalar": _LAYER + "layer_scalar",
    "router": _LAYER + "router.proj.weight",
    "router_norm": _LAYER + "router.scale",
    "expert_factors": _LAYER + "router.per_expert_scale",
    **dict.fromkeys(("expert_gate", "expert_up"), _LAYER + "experts.gate_up_proj"),
    "expert_down": _LAYER + "experts.down_proj",
    **{f"shared_{role}": _LAYER + f"mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
}
OTHER_RULES = (in_language_model(CHECKPOINT_RULES),)
IGNORED = ("model.vision_tower.*", "model.embed_vision.*", "model.audio_tower.*", "model.embed_audio.*")
"""Tensors of what reads images and sounds: requests with them are rejected."""
CLASS_DEFAULTS = {"hidden_size_per_layer_input": 256, "enable_moe_block": False}
"""Values of keys that other models of the line leave out."""
TYPES = (
    ("full_attention", {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}),
    ("sliding_attention", {"rope_type": "default", "rope_theta": 1e4}),
)
"""Types of layers without and with a window, and their default rotation."""
EVERY = 6
"""Interval of layers without a window, unless `layer_types` lists them."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = CLASS_DEFAULTS | dict(text_config_of({"tie_word_embeddings": True, **config}))
    refuse_other_values(
        config,
        "gemma4_text",
        hidden_activation=("gelu_pytorch_tanh",),
        enable_moe_block=(True,),
        hidden_size_per_layer_input=(0,),
        num_kv_shared_layers=(0,),
        use_double_wide_mlp=(False,),
        use_bidirectional_attention=("vision",),
        attention_bias=(False,),
    )
    outline, windows = outline_of(config, norm_eps=1e-6, max_positions=131072, tied=True), _windows(config)
    layers = (replace(layer, post_norms=True, has_scalar=True) for layer in layers_of(config, "gqa", windows=windows))
    return ModelSpec(
        family="gemma4_text",
        **outline,
        **attention_by_window(tuple(layers), *_attentions(config, windows)),
        dense_intermediate_size=0,
        router=RouterSpec(
            num_experts=integer_of(config, "num_experts"),
            top_k=integer_of(config, "top_k_experts"),
            renormalize=True,
            own_norm=True,
            expert_factors=True,
        ),
        experts=ExpertSpec(
            integer_of(config, "moe_intermediate_size"),
            layout="fused_out_in",
            activation="gelu_tanh",
            shared="plain",
            shared_size=integer_of(config, "intermediate_size", 9216),
            separate_norms=True,
        ),
        factors=FactorSpec(
            embedding_multiplier=math.sqrt(outline["hidden_size"]),
            rounded_embedding_multiplier=True,
            logits_cap=amount_of(config, "final_logit_softcapping"),
        ),
        float32_norms=True,
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer; the last layer has none, whatever its type."""
    num_layers = integer_of(config, "num_hidden_layers")
    sliding = tuple(layer for layer in range(num_layers) if (layer + 1) % EVERY)
    windows = windows_of(config, default=512, sliding=sliding)
    return (*windows[:-1], 0) if any(windows[:-1]) else ()


def _attentions(config: Mapping[str, Any], windows: Sequence[int]) -> tuple[GroupedAttention, GroupedAttention]:
    """Return the attention of layers without and with a window."""
    num_heads = integer_of({"num_attention_heads": 8, **config}, "num_attention_heads")
    are_shared = flag_of(config, "attention_k_eq_v")
    heads = {
        "num_kv_heads": integer_of(config, "num_key_value_heads", 4),
        "head_dim": integer_of(config, "head_dim", 256),
    }
    num_layers = integer_of(config, "num_hidden_layers")
    full_layers = [layer for layer in range(num_layers) if not windows or not windows[layer]]

    def attention(kind: str, default: Mapping[str, Any], sizes: Mapping[str, int], values: str) -> GroupedAttention:
        return GroupedAttention(
            num_heads=num_heads,
            num_kv_heads=sizes["num_kv_heads"],
            head_dim=sizes["head_dim"],
            rope=rope_of_type(config, "gemma4_text", kind, head_dim=sizes["head_dim"], default=default),
            qk_norm="head",
            score_scale=1.0,
            values=values,
            value_norm=True,
        )

    full_heads = heads | _full_heads(config, full_layers, have_own_count=are_shared)
    full, windowed = TYPES
    return attention(*full, full_heads, "keys" if are_shared else "own"), attention(*windowed, heads, "own")


def _full_heads(config: Mapping[str, Any], layers: Collection[int], *, have_own_count: bool) -> dict[str, int]:
    """Return the head size and, if it differs, the number of KV heads of the layers without a window.

    Published files have them under keys of their own, transformers in an object for each of these layers.

    Raises: UnsupportedModelError if these layers differ, or other layers have an object.
    """
    if config.get("per_layer_config") is None:
        found = {"head_dim": integer_of(config, "global_head_dim", 512)}
        if have_own_count and config.get("num_global_key_value_heads") is not None:
            found["num_kv_heads"] = integer_of(config, "num_global_key_value_heads")
        return found
    listed = object_of(config, "per_layer_config")
    of_layers = {int(key): value for key, value in listed.items() if str(key).isdecimal()}
    objects = [of_layers.get(layer, {}) for layer in layers]
    first = objects[0]
    if (
        len(of_layers) != len(listed)
        or set(of_layers) - set(layers)
        or any(each != first for each in objects)
        or not isinstance(first, Mapping)
        or first.keys() - {"head_dim", "num_key_value_heads"}
    ):
        raise UnsupportedModelError(
            "config.json: per_layer_config must give the layers of full_attention the same head_dim and "
            f"num_key_value_heads, and other layers nothing, found {reprlib.repr(listed)}"
        )
    names = {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
    return {name: integer_of(first, key) for key, name in names.items() if key in first}
