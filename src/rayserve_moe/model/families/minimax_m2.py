"""MiniMax-M2: norms over the whole projections of q and k, rotation of part of a head, and a biased sigmoid router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of, rotary_dim_of
from rayserve_moe.model.config_values import integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, BLOCK_SPARSE_EXPERTS, DECODER

ARCHITECTURE = "MiniMaxM2ForCausalLM"

CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **BLOCK_SPARSE_EXPERTS,
    "selection_bias": "model.layers.{layer}.block_sparse_moe.e_score_correction_bias",
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "minimax_m2",
        hidden_act=("silu",),
        use_qk_norm=(True,),
        qk_norm_type=("per_layer",),
        scoring_func=("sigmoid",),
        use_routing_bias=(True,),
        shared_intermediate_size=(0,),
    )
    heads = heads_of(config, head_dim=128)
    rotated = integer_of(config, "rotary_dim", heads["head_dim"])
    return ModelSpec(
        family="minimax_m2",
        **outline_of(config, norm_eps=1e-6, max_positions=196608),
        layers=layers_of(config, "gqa"),
        dense_intermediate_size=0,
        mixers=(
            GroupedAttention(
                **heads,
                qk_norm="full",
                rope=rope_of(
                    config,
                    "minimax_m2",
                    theta=5e6,
                    rotary_dim=rotary_dim_of(config, heads["head_dim"], default=rotated),
                ),
            ),
        ),
        router=RouterSpec(
            num_experts=integer_of(config, "num_local_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=True,
            score="sigmoid",
            selection_bias=True,
        ),
        experts=ExpertSpec(integer_of(config, "intermediate_size")),
    )
