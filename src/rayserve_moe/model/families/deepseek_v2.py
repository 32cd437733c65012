"""DeepSeek-V2: multi-head latent attention, and softmax scores within the groups of the best experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import (
    experts_of,
    first_layers_dense,
    grouped,
    latent_attention_of,
    layers_of,
    outline_of,
)
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import integer_of, number_of, refuse_other_values
from rayserve_moe.model.spec import ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import DECODER, DENSE_MLP, EXPERTS, LATENT_ATTENTION, SHARED_EXPERTS

ARCHITECTURE = "DeepseekV2ForCausalLM"

CHECKPOINT_RULES = DECODER | LATENT_ATTENTION | DENSE_MLP | EXPERTS | SHARED_EXPERTS


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    # Implementations differ in their treatment of `norm_topk_prob`; only false is unambiguous.
    refuse_other_values(
        config,
        "deepseek_v2",
        hidden_act=("silu",),
        mlp_bias=(False,),
        moe_layer_freq=(1,),
        norm_topk_prob=(False,),
        scoring_func=("softmax",),
        topk_method=("greedy", "group_limited_greedy"),
    )
    return ModelSpec(
        family="deepseek_v2",
        **outline_of(config, norm_eps=1e-6, max_positions=2048),
        layers=layers_of(config, "mla", dense=first_layers_dense(config, default=0)),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(latent_attention_of(config, rope=rope_of(config, "deepseek_v2", interleaved=True)),),
        router=_router(config),
        experts=experts_of(config, "n_shared_experts", default=2),
    )


def _router(config: Mapping[str, Any]) -> RouterSpec:
    has_groups = config.get("topk_method") == "group_limited_greedy"
    return grouped(
        RouterSpec(
            num_experts=integer_of(config, "n_routed_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=False,
            num_groups=integer_of(config, "n_group") if has_groups else 1,
            groups_kept=integer_of(config, "topk_group") if has_groups else 1,
            group_score="max",
            scale=number_of(config, "routed_scaling_factor", 1.0),
        )
    )
