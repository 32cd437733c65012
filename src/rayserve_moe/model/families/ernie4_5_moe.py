"""ERNIE 4.5: interleaved rotation, softmax scores with a selection bias, and layers with experts at intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import experts_of, heads_of, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import count_of, integer_of, number_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS, SHARED_EXPERTS

ARCHITECTURE = "Ernie4_5_MoeForCausalLM"

CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **DENSE_MLP,
    **EXPERTS,
    **SHARED_EXPERTS,
    "selection_bias": "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias",
}

IGNORED = ("model.mtp_*",)
"""Tensors of the multi-token prediction block."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(config, "ernie4_5_moe", hidden_act=("silu",), use_bias=(False,))
    return ModelSpec(
        family="ernie4_5_moe",
        **outline_of(config, norm_eps=1e-5, max_positions=131072, tied=True),
        layers=layers_of(config, "gqa", dense=_dense_layer_ids(config)),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(
            GroupedAttention(**heads_of(config), rope=rope_of(config, "ernie4_5_moe", theta=5e5, interleaved=True)),
        ),
        router=RouterSpec(
            num_experts=integer_of(config, "moe_num_experts"),
            top_k=integer_of(config, "moe_k", 6),
            renormalize=True,
            selection_bias=True,
            selection_bias_in_row=True,
            renormalize_floor=number_of(config, "moe_norm_min", 1e-12),
        ),
        experts=experts_of(config, "moe_num_shared_experts", default=2),
    )


def _dense_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers, every = integer_of(config, "num_hidden_layers"), integer_of(config, "moe_layer_interval", 1)
    first = count_of(config, "moe_layer_start_index", 1)
    last = (
        num_layers - 1
        if config.get("moe_layer_end_index") == -1
        else count_of(config, "moe_layer_end_index", num_layers - 1)
    )
    return tuple(i for i in range(num_layers) if not (first <= i <= last and (i + 1) % every == 0))
