"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, served up to the length at which it is dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import biased_sigmoid_router_of, latent_model_of, outline_of, within_index
from rayserve_moe.model.config_values import integer_of, refuse_other_values
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import LATENT_MODEL

ARCHITECTURE = "DeepseekV32ForCausalLM"

CHECKPOINT_RULES = LATENT_MODEL
IGNORED = ("*.self_attn.indexer.*",)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "deepseek_v32",
        hidden_act=("silu",),
        moe_layer_freq=(1,),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
        mlp_bias=(False,),
        rope_interleave=(True,),
    )
    outline = outline_of(config, norm_eps=1e-6, max_positions=163840)
    router = biased_sigmoid_router_of(config, scale=2.5, groups=(8, 4))
    spec = latent_model_of(config, "deepseek_v32", router=router, num_dense=3, outline=outline)
    return within_index(spec, integer_of(config, "index_topk", 2048), key="index_topk")
