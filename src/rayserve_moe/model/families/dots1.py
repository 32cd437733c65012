"""dots.llm1: grouped attention with norms of heads, and the router of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import (
    biased_sigmoid_router_of,
    experts_of,
    first_layers_dense,
    heads_of,
    layers_of,
    outline_of,
    windows_of,
)
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import count_of, flag_of, integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, DENSE_MLP, EXPERTS, SELECTION_BIAS, SHARED_EXPERTS

ARCHITECTURE = "Dots1ForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | DENSE_MLP | EXPERTS | SELECTION_BIAS | SHARED_EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config, "dots1", hidden_act=("silu",), scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,)
    )
    num_layers = integer_of(config, "num_hidden_layers")
    first_window = count_of(config, "max_window_layers", 62) if config.get("sliding_window", 4096) else num_layers
    bias = flag_of(config, "attention_bias")
    router = biased_sigmoid_router_of(config, scale=1.0)
    return ModelSpec(
        family="dots1",
        **outline_of(config, norm_eps=1e-6, max_positions=2048),
        layers=layers_of(
            config,
            "gqa",
            dense=first_layers_dense(config, default=0),
            windows=windows_of(config, default=4096, sliding=range(first_window, num_layers)),
        ),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(
            GroupedAttention(
                **heads_of(config),
                bias=bias,
                output_bias=bias,
                qk_norm="head",
                rope=rope_of(config, "dots1"),
            ),
        ),
        router=replace(router, renormalize=flag_of(config, "norm_topk_prob")),
        experts=experts_of(config, "n_shared_experts", default=0),
    )
