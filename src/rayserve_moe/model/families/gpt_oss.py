"""gpt-oss: attention sinks, windows in every other layer, and biased experts with a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import heads_of, layers_of, outline_of, windows_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RouterSpec
from rayserve_moe.model.tensor_names import ATTENTION, DECODER

ARCHITECTURE = "GptOssForCausalLM"

_LAYER = "model.layers.{layer}."
CHECKPOINT_RULES = {
    **DECODER,
    **ATTENTION,
    "sinks": _LAYER + "self_attn.sinks",
    "router": _LAYER + "mlp.router.weight",
    "router_bias": _LAYER + "mlp.router.bias",
    "expert_gate": _LAYER + "mlp.experts.gate_up_proj",
    "expert_up": _LAYER + "mlp.experts.gate_up_proj",
    "expert_down": _LAYER + "mlp.experts.down_proj",
    "expert_gate_bias": _LAYER + "mlp.experts.gate_up_proj_bias",
    "expert_up_bias": _LAYER + "mlp.experts.gate_up_proj_bias",
    "expert_down_bias": _LAYER + "mlp.experts.down_proj_bias",
}

_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
"""Default scaling of a config without scaling."""


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "gpt_oss",
        hidden_act=("silu",),
        swiglu_limit=(7.0,),
        swiglu_alpha=(1.702,),
    )
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = {**config, "rope_scaling": _ROPE}
    outline, bias = outline_of(config, norm_eps=1e-5, max_positions=131072), flag_of(config, "attention_bias", True)
    return ModelSpec(
        family="gpt_oss",
        **outline,
        layers=layers_of(
            config,
            "gqa",
            windows=windows_of(config, default=128, sliding=range(0, integer_of(config, "num_hidden_layers"), 2)),
        ),
        dense_intermediate_size=0,
        mixers=(
            GroupedAttention(
                **heads_of(config, head_dim=64),
                bias=bias,
                output_bias=bias,
                sinks=True,
                rope=rope_of(config, "gpt_oss", theta=150000.0),
            ),
        ),
        router=RouterSpec(
            num_experts=integer_of(config, "num_local_experts"),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=True,
            logit_bias=True,
        ),
        experts=ExpertSpec(
            integer_of(config, "intermediate_size"),
            layout="fused_in_out_interleaved",
            bias=True,
            activation="clamped_swiglu",
        ),
    )
