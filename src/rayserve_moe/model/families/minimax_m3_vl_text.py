"""MiniMax-M3, the language model only: block-sparse attention, norms by 1 + w, a clamped activation in all MLPs."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rayserve_moe.model.config_parts import (
    biased_sigmoid_router_of,
    first_layers_dense,
    heads_of,
    layer_flags_of,
    layer_types_of,
    layers_of,
    outline_of,
)
from rayserve_moe.model.config_rope import rope_of, rotary_dim_of
from rayserve_moe.model.config_values import (
    count_of,
    flag_of,
    integer_of,
    number_of,
    object_of,
    refuse_contradiction,
    refuse_other_values,
    text_config_of,
)
from rayserve_moe.model.layers.attention import BLOCKS, BlockIndex, GroupedAttention
from rayserve_moe.model.spec import ExpertSpec, ModelSpec, RopeSpec, UnsupportedModelError
from rayserve_moe.model.tensor_names import (
    ATTENTION,
    BLOCK_INDEX,
    BLOCK_SPARSE_EXPERTS,
    DECODER,
    DENSE_MLP,
    EXPERTS,
    FUSED_BLOCK_INDEX,
    FUSED_EXPERTS,
    SELECTION_BIAS,
    SHARED_EXPERTS,
    below_language_model,
    moved,
)

ARCHITECTURE = "MiniMaxM3VLForCausalLM"
OTHER_ARCHITECTURES = ("MiniMaxM3SparseForConditionalGeneration",)
"""The multimodal model, whose language model alone is served."""

_SPARSE = "minimax_m3_sparse"
"""Kind of a layer with sparse attention."""
_LAYER = "model.layers.{layer}."
_MLP, _SHARED = _LAYER + "mlp.", _LAYER + "mlp.shared_experts."
CHECKPOINT_RULES = below_language_model(
    {
        **DECODER,
        **ATTENTION,
        **BLOCK_INDEX,
        **DENSE_MLP,
        **BLOCK_SPARSE_EXPERTS,
        **moved(SHARED_EXPERTS, _MLP, _LAYER + "block_sparse_moe."),
        "selection_bias": _LAYER + "block_sparse_moe.e_score_correction_bias",
    }
)
OTHER_RULES = (
    {
        **DECODER,
        **ATTENTION,
        **FUSED_BLOCK_INDEX,
        **EXPERTS,
        **FUSED_EXPERTS,
        **SELECTION_BIAS,
        **dict.fromkeys(("dense_gate", "dense_up"), _MLP + "gate_up_proj.weight"),
        "dense_down": _MLP + "down_proj.weight",
        **dict.fromkeys(("shared_gate", "shared_up"), _SHARED + "gate_up_proj.weight"),
        "shared_down": _SHARED + "down_proj.weight",
    },
)
IGNORED = (
    # Images are refused.
    *("vision_tower.*", "multi_modal_projector.*", "patch_merge_mlp.*"),
    # Prediction layers have tensors that no rule names.
    *("mtp.*", "*.mtp.*"),
)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a `config.json`.

    Raises: UnsupportedModelError with a key and its value if the family does not support it.
    """
    config = _with_layer_kinds(text_config_of(config))
    refuse_other_values(
        config,
        "minimax_m3_vl_text",
        hidden_act=("silu", "swigluoai"),
        use_gemma_norm=(True,),
        use_qk_norm=(True,),
        qk_norm_type=("per_head",),
        scoring_func=("sigmoid",),
        use_routing_bias=(True,),
        attention_output_gate=(False,),
        n_shared_experts=(1,),
    )
    heads = heads_of(config, head_dim=128)
    spec = ModelSpec(
        family="minimax_m3_vl_text",
        **outline_of(config, norm_eps=1e-6, max_positions=524288),
        layers=layers_of(config, "gqa", dense=first_layers_dense(config, default=0)),
        dense_intermediate_size=integer_of(config, "dense_intermediate_size", 12288),
        mixers=(GroupedAttention(**heads, qk_norm="head", rope=_rope_of(config, heads["head_dim"])),),
        router=biased_sigmoid_router_of(config, scale=2.0, experts="num_local_experts"),
        experts=ExpertSpec(
            integer_of(config, "intermediate_size"),
            activation="clamped_swiglu",
            gate_slope=number_of(config, "swiglu_alpha", 1.702),
            gate_limit=number_of(config, "swiglu_limit", 7.0),
            shared="plain",
            shared_size=integer_of(config, "shared_intermediate_size", 3072),
        ),
        norm_offset=1.0,
    )
    return _with_index(spec, config)


def _with_layer_kinds(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with kinds of layers as transformers writes them, by the flags of published files."""
    sparse = object_of(config, "sparse_attention_config")
    kinds: dict[str, list[str]] = {}
    if config.get("moe_layer_freq") is not None:
        kinds["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in layer_flags_of(config, "moe_layer_freq")]
        refuse_contradiction(config, "mlp_layer_types", "moe_layer_freq", kinds["mlp_layer_types"])
    if config.get("layer_types") is None and sparse.get("sparse_attention_freq") is not None:
        flags = layer_flags_of({**config, **sparse}, "sparse_attention_freq")
        kinds["layer_types"] = [_SPARSE if flag else "full_attention" for flag in flags]
    return {**config, **kinds}


def _rope_of(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """Read the rotation; published files say how much of a head rotates by a width and by a share."""
    width = integer_of(config, "rotary_dim", head_dim)
    rotated = rotary_dim_of(config, head_dim, default=width)
    if config.get("rotary_dim") is not None and width != (rotated or head_dim):
        raise UnsupportedModelError(
            f"config.json: rotary_dim = {width}, but partial_rotary_factor rotates {rotated or head_dim} elements"
        )
    return rope_of(config, "minimax_m3_vl_text", theta=5e6, rotary_dim=rotated)


def _with_index(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Return the model with block-sparse attention in its sparse layers.

    Raises: UnsupportedModelError if the index of a sparse layer also adds values.
    """
    sparse = object_of(config, "sparse_attention_config")
    if config.get("layer_types") is None or not flag_of(sparse, "use_sparse_attention", True):
        return spec
    types = layer_types_of(config, "layer_types", f"full_attention {_SPARSE}")
    if sparse.get("sparse_disable_index_value") is not None:
        disabled = layer_flags_of({**config, **sparse}, "sparse_disable_index_value")
        if any(kind == _SPARSE and not flag for kind, flag in zip(types, disabled, strict=True)):
            raise UnsupportedModelError(
                f"config.json: sparse_disable_index_value = {reprlib.repr(disabled)} is not supported (only 1 in "
                "layers of sparse attention)"
            )
    refuse_other_values(sparse, "minimax_m3_vl_text", sparse_score_type=("max",))
    (dense,) = spec.mixers
    assert isinstance(dense, GroupedAttention), dense
    index = BlockIndex(
        num_heads=_sparse_integer(config, "n_heads", 4, published="num_index_heads"),
        head_dim=_sparse_integer(config, "head_dim", 128, published="index_dim"),
        block_size=_sparse_integer(config, "block_size", 128),
        top_k=_sparse_integer(config, "topk_blocks", 16),
        local_blocks=_local_blocks(config),
        first_blocks=count_of(sparse, "sparse_init_block", 0),
    )
    of_types = {"full_attention": dense, _SPARSE: replace(dense, index=index, kind=BLOCKS)}
    return replace(
        spec,
        layers=tuple(replace(layer, mixer=of_types[kind].kind) for layer, kind in zip(spec.layers, types, strict=True)),
        mixers=tuple(mixer for kind, mixer in of_types.items() if kind in types),
    )


def _sparse_integer(config: Mapping[str, Any], name: str, default: int, *, published: str = "") -> int:
    """Return a size of the index; published files have it in `sparse_attention_config`, transformers beside it."""
    sparse, key = object_of(config, "sparse_attention_config"), f"sparse_{published or name}"
    return integer_of(sparse, key) if sparse.get(key) is not None else integer_of(config, f"index_{name}", default)


def _local_blocks(config: Mapping[str, Any]) -> int:
    """Return the number of blocks up to its own that a token always sees, which may be 0."""
    sparse, key = object_of(config, "sparse_attention_config"), "sparse_local_block"
    return count_of(sparse, key, 1) if sparse.get(key) is not None else count_of(config, "index_local_blocks", 1)
