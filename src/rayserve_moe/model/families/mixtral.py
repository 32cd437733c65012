"""Mixtral: the plain mixture of experts, with a sliding window in old configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, BLOCK_SPARSE_EXPERTS, DECODER

ARCHITECTURE = "MixtralForCausalLM"

CHECKPOINT_RULES = DECODER | ATTENTION | BLOCK_SPARSE_EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(config, "mixtral", hidden_act=("silu",))
    window = 0 if config.get("sliding_window") is None else integer_of(config, "sliding_window")
    return ModelSpec(
        family="mixtral",
        **outline_of(config, norm_eps=1e-5, max_positions=131072),
        layers=layers_of(config, "gqa", windows=(window,) * integer_of(config, "num_hidden_layers")),
        dense_intermediate_size=0,
        mixers=(GroupedAttention(**heads_of(config), rope=rope_of(config, "mixtral", theta=1e6)),),
        router=RouterSpec(
            num_experts=integer_of(config, "num_local_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=True,
        ),
        experts=ExpertSpec(integer_of(config, "intermediate_size")),
    )
