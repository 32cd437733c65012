"""Hunyuan-A13B: norms of q and k after the rotation, and a shared expert as wide as the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER, EXPERTS

ARCHITECTURE = "HunYuanMoEV1ForCausalLM"

_LAYER = "model.layers.{layer}."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    **EXPERTS,
    "q_norm": _LAYER + "self_attn.query_layernorm.weight",
    "k_norm": _LAYER + "self_attn.key_layernorm.weight",
    "router": _LAYER + "mlp.gate.wg.weight",
    "shared_gate": _LAYER + "mlp.shared_mlp.gate_proj.weight",
    "shared_up": _LAYER + "mlp.shared_mlp.up_proj.weight",
    "shared_down": _LAYER + "mlp.shared_mlp.down_proj.weight",
}

_PER_LAYER = ("moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert")


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = {**config, **{key: _same_everywhere(config.get(key)) for key in _PER_LAYER}}
    width, heads = integer_of(config, "intermediate_size"), heads_of(config)
    refuse_other_values(
        config,
        "hunyuan_v1_moe",
        hidden_act=("silu",),
        mlp_bias=(False,),
        use_cla=(False,),
        use_qk_norm=(True,),
        moe_intermediate_size=(width,),
        num_shared_expert=(1,),
    )
    bias = flag_of(config, "attention_bias")
    return ModelSpec(
        family="hunyuan_v1_moe",
        **outline_of(config, norm_eps=1e-5, max_positions=2048),
        layers=layers_of(config, "gqa"),
        dense_intermediate_size=0,
        mixers=(
            GroupedAttention(
                **heads,
                bias=bias,
                output_bias=bias,
                qk_norm="head",
                qk_norm_after_rope=True,
                rope=rope_of(config, "hunyuan_v1_moe", alpha_dim=heads["head_dim"]),
            ),
        ),
        router=RouterSpec(
            num_experts=integer_of(config, "num_experts"),
            top_k=integer_of(config, "moe_topk", 1),
            renormalize=True,
        ),
        experts=ExpertSpec(width, shared="plain", shared_size=width),
    )


def _same_everywhere(value: Any) -> Any:
    """Return the common number of a per-layer list; other values are returned unchanged and rejected later."""
    return value[0] if isinstance(value, list) and value and all(number == value[0] for number in value) else value
