"""GLM-5: latent attention with an index of tokens, which several layers may share."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.config_parts import (
    biased_sigmoid_router_of,
    latent_model_of,
    layer_types_of,
    outline_of,
    sparse_model_of,
)
from rayserve_moe.model.config_values import count_of, integer_of, refuse_other_values
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import LATENT_MODEL, TOKEN_INDEX

ARCHITECTURE = "GlmMoeDsaForCausalLM"

CHECKPOINT_RULES = LATENT_MODEL | TOKEN_INDEX


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    refuse_other_values(
        config,
        "glm_moe_dsa",
        hidden_act=("silu",),
        moe_layer_freq=(1,),
        scoring_func=("sigmoid",),
        topk_method=("noaux_tc",),
        mlp_bias=(False,),
        rope_interleave=(True,),
        indexer_rope_interleave=(True,),
    )
    outline = outline_of(config, norm_eps=1e-5, max_positions=202752)
    router = biased_sigmoid_router_of(config, scale=2.5)
    model = latent_model_of(config, "glm_moe_dsa", router=router, num_dense=3, outline=outline)
    return sparse_model_of(config, model, heads=32, interleaved=True, kinds=_indexer_types(config))


def _indexer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer's index, `full` or `shared`.

    They stand in `indexer_types` or, as letters, in `index_topk_pattern`. Without both, the layers before
    `index_skip_topk_offset` are full, and of the others every `index_topk_freq`-th, counted from the last of those.
    """
    if config.get("indexer_types") is not None:
        return layer_types_of(config, "indexer_types", "full shared")
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - set("FS"):
            raise UnsupportedModelError(
                f"config.json: index_topk_pattern must consist of F and S, found {reprlib.repr(pattern)}"
            )
        types = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
        return layer_types_of({**config, "index_topk_pattern": types}, "index_topk_pattern", "full shared")
    interval, offset = integer_of(config, "index_topk_freq", 1), count_of(config, "index_skip_topk_offset", 2)
    num_layers = integer_of(config, "num_hidden_layers")
    return ["shared" if max(layer - offset + 1, 0) % interval else "full" for layer in range(num_layers)]
