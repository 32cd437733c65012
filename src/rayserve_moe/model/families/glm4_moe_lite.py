"""GLM-4.7-Flash: multi-head latent attention, with the router of GLM-4.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import biased_sigmoid_router_of, latent_model_of, outline_of
from rayserve_moe.model.config_values import refuse_other_values
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.tensor_names import LATENT_MODEL

ARCHITECTURE = "Glm4MoeLiteForCausalLM"

CHECKPOINT_RULES = LATENT_MODEL


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "glm4_moe_lite",
        hidden_act=("silu",),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
    )
    outline = outline_of(config, norm_eps=1e-5, max_positions=202752)
    router = biased_sigmoid_router_of(config, scale=1.8)
    return latent_model_of(config, "glm4_moe_lite", router=router, num_dense=1, outline=outline)
