"""Qwen3-Next: three gated delta layers, then gated attention; norms by 1 + w, and a shared expert behind a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import hybrid_model_of, layers_between_dense
from rayserve_moe.model.config_values import flag_of, integer_of, refuse_other_values
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import (
    ATTENTION,
    DECODER,
    DENSE_MLP,
    EXPERTS,
    FUSED_EXPERTS,
    GATED_DELTA,
    GATED_SHARED_EXPERT,
    MTP_FORMS,
)

ARCHITECTURE = "Qwen3NextForCausalLM"

_LINEAR = "model.layers.{layer}.linear_attn."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **DENSE_MLP,
    **EXPERTS,
    **GATED_SHARED_EXPERT,
    **GATED_DELTA,
    "delta_qkvz": _LINEAR + "in_proj_qkvz.weight",
    "delta_ba": _LINEAR + "in_proj_ba.weight",
}
OTHER_RULES = (CHECKPOINT_RULES | FUSED_EXPERTS,)
PREDICTION_RULES = MTP_FORMS
IGNORED = ("mtp.*",)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(config, "qwen3_next", hidden_act=("silu",), attention_bias=(False,))
    return hybrid_model_of(
        config,
        "qwen3_next",
        fused="by_key_head",
        renormalize=flag_of(config, "norm_topk_prob", True),
        dense=layers_between_dense(config),
        dense_size=integer_of(config, "intermediate_size", 5632),
    )
