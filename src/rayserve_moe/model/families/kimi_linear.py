"""Kimi-Linear: Kimi delta layers, and latent attention without rotation in about every fourth layer."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from rayserve_moe.kernels.reference.delta_gates import GateRule
from rayserve_moe.model.config_parts import (
    biased_sigmoid_router_of,
    experts_of,
    first_layers_dense,
    hybrid_layers_of,
    latent_attention_of,
    outline_of,
)
from rayserve_moe.model.config_values import (
    KIMI_KEYS,
    integer_of,
    object_of,
    refuse_other_values,
    with_shared_keys,
)
from rayserve_moe.model.layers.kimi_delta import KimiDelta
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import (
    BLOCK_SPARSE_EXPERTS,
    DECODER,
    DENSE_MLP,
    KIMI_DELTA,
    LATENT_ATTENTION,
    SHARED_EXPERTS,
    moved,
)

ARCHITECTURE = "KimiLinearForCausalLM"

_LAYER = "model.layers.{layer}."
_ATTENTION, _EXPERTS = _LAYER + "self_attn.", _LAYER + "block_sparse_moe."
CHECKPOINT_RULES = {
    **DECODER,
    **LATENT_ATTENTION,
    **KIMI_DELTA,
    **DENSE_MLP,
    **BLOCK_SPARSE_EXPERTS,
    **moved(SHARED_EXPERTS, _LAYER + "mlp.", _EXPERTS),
    "selection_bias": _EXPERTS + "gate.e_score_correction_bias",
    "kda_a_in": _ATTENTION + "f_a_proj.weight",
    "kda_a": _ATTENTION + "f_b_proj.weight",
    "kda_z_in": _ATTENTION + "g_a_proj.weight",
    "kda_z": _ATTENTION + "g_b_proj.weight",
}
OTHER_RULES = (CHECKPOINT_RULES | moved(DENSE_MLP, _LAYER + "mlp.", _EXPERTS),)
"""Names of transformers, which puts dense layers under the prefix of experts."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = _flattened({"q_lora_rank": None, **with_shared_keys(config, KIMI_KEYS)})
    refuse_other_values(
        config,
        "kimi_linear",
        hidden_act=("silu",),
        mla_use_nope=(True,),
        moe_layer_freq=(1,),
        moe_router_activation_func=("sigmoid",),
        tie_word_embeddings=(False,),
    )
    head_dim = integer_of(config, "linear_head_dim", 128)
    layers = hybrid_layers_of(config, linear="kimi_delta", full="mla", dense=first_layers_dense(config, default=1))
    mixers = (
        latent_attention_of(config, rope=None),
        KimiDelta(
            num_heads=integer_of(config, "linear_num_heads", 32),
            head_dim=head_dim,
            num_taps=integer_of(config, "linear_conv_kernel_dim", 4),
            gates=GateRule(output="sigmoid"),
            rank=head_dim,
            decay_rates_in_block=True,
        ),
    )
    kinds = {layer.mixer for layer in layers}
    return ModelSpec(
        family="kimi_linear",
        **outline_of(config, norm_eps=1e-5, max_positions=1048576),
        layers=layers,
        dense_intermediate_size=integer_of(config, "intermediate_size", 9216),
        mixers=tuple(own for own in mixers if own.kind in kinds),
        router=biased_sigmoid_router_of(config, scale=2.446, experts="num_experts"),
        experts=experts_of(config, "n_shared_experts", default=1),
    )


def _flattened(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the keys of its `linear_attn_config` at the top; lists of layers there count from 1.

    Raises: UnsupportedModelError if the two lists of layers contradict each other.
    """
    linear, num_layers = object_of(config, "linear_attn_config"), integer_of(config, "num_hidden_layers")
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    sizes = with_shared_keys(linear, {**names, "short_conv_kernel_size": "linear_conv_kernel_dim"})
    found = {**config, **{key: value for key, value in sizes.items() if key.startswith("linear_")}}
    if config.get("layer_types") is not None:
        return found
    layers = range(1, num_layers + 1)
    listed, others = (_layers_at(linear, key, num_layers) for key in ("full_attn_layers", "kda_layers"))
    if listed is None:
        recurrent = [layer for layer in layers if layer == 1 or layer % 4 != 1] if others is None else others
        listed = [layer for layer in layers if layer not in recurrent]
    elif (others or []) != [layer for layer in layers if layer not in listed]:
        shown = (f"{key} = {reprlib.repr(linear.get(key))}" for key in ("kda_layers", "full_attn_layers"))
        raise UnsupportedModelError(f"config.json: {' contradicts '.join(shown)}")
    kinds = ["full_attention" if layer in listed else "linear_attention" for layer in layers]
    return {**found, "layer_types": kinds}


def _layers_at(linear: Mapping[str, Any], key: str, num_layers: int) -> list[int] | None:
    """Return the layers under a key, up to `num_layers`; None without the key.

    Raises: UnsupportedModelError for another value.
    """
    listed = linear.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise UnsupportedModelError(f"config.json: {key} must be a list of layers, found {reprlib.repr(listed)}")
    return [layer for layer in listed if layer <= num_layers]
