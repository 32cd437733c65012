"""Qwen3.5 and Qwen3.6 MoE, the language model only: Qwen3-Next with separate projections in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import hybrid_model_of
from rayserve_moe.model.config_values import refuse_other_values, text_config_of
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import (
    ATTENTION,
    DECODER,
    EXPERTS,
    FUSED_EXPERTS,
    GATED_DELTA,
    GATED_SHARED_EXPERT,
    MTP_FORMS,
    in_language_model,
)

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
OTHER_ARCHITECTURES = ("Qwen3_5MoeForConditionalGeneration",)
"""The multimodal model, whose language model alone is served."""

_LINEAR = "model.layers.{layer}.linear_attn."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **EXPERTS,
    **GATED_SHARED_EXPERT,
    **GATED_DELTA,
    "delta_qkv": _LINEAR + "in_proj_qkv.weight",
    "delta_z": _LINEAR + "in_proj_z.weight",
    "delta_b": _LINEAR + "in_proj_b.weight",
    "delta_a": _LINEAR + "in_proj_a.weight",
}
_FUSED = CHECKPOINT_RULES | FUSED_EXPERTS
OTHER_RULES = (_FUSED, in_language_model(CHECKPOINT_RULES), in_language_model(_FUSED))
PREDICTION_RULES = MTP_FORMS
IGNORED = ("mtp.*", "model.visual.*")


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = text_config_of(config)
    refuse_other_values(
        config, "qwen3_5_moe_text", hidden_act=("silu",), attention_bias=(False,), attn_output_gate=(True,)
    )
    return hybrid_model_of(config, "qwen3_5_moe_text", fused="by_part", renormalize=True)
