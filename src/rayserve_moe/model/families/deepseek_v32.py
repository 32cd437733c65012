"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import biased_sigmoid_router_of, latent_model_of, outline_of, sparse_model_of
from rayserve_moe.model.config_values import refuse_other_values
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import LATENT_MODEL, TOKEN_INDEX

ARCHITECTURE = "DeepseekV32ForCausalLM"

CHECKPOINT_RULES = LATENT_MODEL | TOKEN_INDEX


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
        indexer_rope_interleave=(False,),
    )
    outline = outline_of(config, norm_eps=1e-6, max_positions=163840)
    router = biased_sigmoid_router_of(config, scale=2.5, groups=(8, 4))
    model = latent_model_of(config, "deepseek_v32", router=router, num_dense=3, outline=outline)
    return sparse_model_of(config, model, heads=64, interleaved=False)
