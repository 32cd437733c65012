"""Qwen3-Next: three gated delta layers, then gated attention; norms by 1 + w, and a shared expert behind a gate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rayserve_moe.model.config_parts import gated_delta_of, heads_of, hybrid_layers_of, layers_between_dense, outline_of
from rayserve_moe.model.config_rope import rope_of, rotary_dim_of
from rayserve_moe.model.config_values import flag_of, integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import (
    ATTENTION,
    DECODER,
    DENSE_MLP,
    EXPERTS,
    GATED_DELTA,
    GATED_SHARED_EXPERT,
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
IGNORED = ("mtp.*",)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(config, "qwen3_next", hidden_act=("silu",), attention_bias=(False,))
    return hybrid_spec_of(
        config,
        "qwen3_next",
        fused="by_key_head",
        renormalize=flag_of(config, "norm_topk_prob", True),
        dense=layers_between_dense(config),
        dense_size=integer_of(config, "intermediate_size", 5632),
    )


def hybrid_spec_of(
    config: Mapping[str, Any],
    family: str,
    *,
    fused: str,
    renormalize: bool,
    dense: Collection[int] = (),
    dense_size: int = 0,
) -> ModelSpec:
    """Return the spec from the keys that Qwen3-Next and Qwen3.5 share.

    `fused` is the form of the projections in files, `dense` are the layers without experts.
    """
    heads = heads_of(config, head_dim=256)
    rotary_dim = rotary_dim_of(config, heads["head_dim"], default=heads["head_dim"] // 4) or heads["head_dim"]
    rope = rope_of(config, family, rotary_dim=rotary_dim)
    attention = GroupedAttention(**heads, qk_norm="head", output_gate=True, rope=rope)
    layers = hybrid_layers_of(config, linear="gated_delta", full="gqa", dense=dense)
    kinds = {layer.mixer for layer in layers}
    return ModelSpec(
        family=family,
        **outline_of(config, norm_eps=1e-6, max_positions=32768),
        layers=layers,
        dense_intermediate_size=dense_size,
        mixers=tuple(own for own in (attention, gated_delta_of(config, fused=fused)) if own.kind in kinds),
        router=RouterSpec(
            num_experts=integer_of(config, "num_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=renormalize,
        ),
        experts=ExpertSpec(
            integer_of(config, "moe_intermediate_size"),
            shared="sigmoid_gated",
            shared_size=integer_of(config, "shared_expert_intermediate_size"),
        ),
        norm_offset=1.0,
    )
