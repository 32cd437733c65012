"""Mistral Small 4, the language model only: latent attention, a factor of queries by position, and fused experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import (
    experts_of,
    first_layers_dense,
    grouped,
    latent_attention_of,
    layers_of,
    outline_of,
)
from rayserve_moe.model.config_rope import query_scale_of, rope_of, rotary_dim_of
from rayserve_moe.model.config_values import flag_of, integer_of, number_of, refuse_other_values, text_config_of
from rayserve_moe.model.spec import ModelSpec, RopeSpec, RouterSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import (
    DECODER,
    DENSE_MLP,
    EXPERTS,
    FUSED_EXPERTS,
    LATENT_ATTENTION,
    SHARED_EXPERTS,
    below_language_model,
)

ARCHITECTURE = "Mistral4ForCausalLM"
OTHER_ARCHITECTURES = ("Mistral3ForConditionalGeneration",)
"""The multimodal model, whose language model alone is served."""

_PER_EXPERT = DECODER | LATENT_ATTENTION | DENSE_MLP | EXPERTS | SHARED_EXPERTS
CHECKPOINT_RULES = _PER_EXPERT | FUSED_EXPERTS
OTHER_RULES = (below_language_model(CHECKPOINT_RULES), below_language_model(_PER_EXPERT), _PER_EXPERT)
"""Quantised files may have a tensor per expert."""
IGNORED = ("vision_tower.*", "multi_modal_projector.*")
"""Tensors of the vision tower: requests with images are rejected."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = text_config_of(config)
    refuse_other_values(config, "mistral4", model_type=("mistral4",), hidden_act=("silu",))
    num_groups = integer_of(config, "n_group", 1)
    attention = latent_attention_of(config, rope=_rope_of(config))
    return ModelSpec(
        family="mistral4",
        **outline_of(config, norm_eps=1e-6, max_positions=1048576),
        layers=layers_of(config, "mla", dense=first_layers_dense(config, default=0)),
        dense_intermediate_size=integer_of(config, "intermediate_size", 12288),
        mixers=(replace(attention, query_scale=query_scale_of(config)),),
        router=grouped(
            RouterSpec(
                num_experts=integer_of(config, "n_routed_experts", 128),
                top_k=integer_of(config, "num_experts_per_tok", 4),
                renormalize=flag_of(config, "norm_topk_prob", True),
                num_groups=num_groups,
                groups_kept=integer_of(config, "topk_group", 1),
                group_score="top2_sum" if num_groups > 1 else "max",
                scale=number_of(config, "routed_scaling_factor", 1.0),
            )
        ),
        experts=replace(experts_of(config, "n_shared_experts", default=1), layout="fused_out_in"),
    )


def _rope_of(config: Mapping[str, Any]) -> RopeSpec:
    """Read the rotation of `qk_rope_head_dim` elements; `partial_rotary_factor`, if given, is their part of a head."""
    width = integer_of(config, "qk_rope_head_dim")
    if (rotated := rotary_dim_of(config, integer_of(config, "qk_nope_head_dim") + width, default=width)) != width:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor rotates {rotated or 'all'} elements of a head, not the "
            f"qk_rope_head_dim = {width}"
        )
    rope = rope_of(config, "mistral4", rotary_dim=width, interleaved=flag_of(config, "rope_interleave", True))
    return replace(rope, rotary_dim=None)
