"""Readers of `config.json` parts that several families share."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayserve_moe.kernels.narrow_weights import SCALE_BLOCK
from rayserve_moe.model.config_rope import rope_of, rotary_dim_of, score_scale_of
from rayserve_moe.model.config_values import amount_of, count_of, flag_of, integer_of, number_of
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.gated_delta import GatedDelta
from rayserve_moe.model.layers.latent import SHARED, SPARSE, LatentAttention, TokenIndex
from rayserve_moe.model.spec import (
    ExpertSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    UnsupportedModelError,
)

BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
INDEX_KINDS = {"full": SPARSE, "shared": SHARED}
"""Kind of sparse attention by type of indexer."""
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def outline_of(
    config: Mapping[str, Any], *, norm_eps: float, max_positions: int, tied: bool = False, dtype: str = "float32"
) -> dict[str, Any]:
    """Read the fields of a ModelSpec that every family has: sizes, norms, the head and the dtype of files.

    `norm_eps`, `max_positions`, `tied` and `dtype` are the defaults of the family.
    """
    return {
        "vocab_size": integer_of(config, "vocab_size"),
        "hidden_size": integer_of(config, "hidden_size"),
        "norm_eps": number_of(config, "rms_norm_eps", norm_eps),
        "tie_embeddings": flag_of(config, "tie_word_embeddings", tied),
        "max_position_embeddings": integer_of(config, "max_position_embeddings", max_positions),
        "checkpoint_dtype": _dtype_of(config, dtype),
        "block_dtype": _block_dtype_of(config),
    }


def _block_dtype_of(config: Mapping[str, Any]) -> str:
    """Return the 8-bit dtype of weights with scales per 128 x 128 block, by `quantization_config`; empty if none.

    It reads block fp8 and compressed-tensors. The files are checked against it when they are opened.
    """
    settings = config.get("quantization_config")
    settings = settings if isinstance(settings, Mapping) else {}
    if settings.get("quant_method") == "fp8":
        return "float8_e4m3fn" if settings.get("weight_block_size") == BLOCK else ""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("strategy") == "block" and weights.get("num_bits") == 8:
            name = {"float": "float8_e4m3fn", "int": "int8"}.get(str(weights.get("type")), "")
            return name if weights.get("block_structure") == BLOCK else ""
    return ""


def _dtype_of(config: Mapping[str, Any], default: str) -> str:
    """Return the dtype of the saved weights; `default` if the config has none.

    Raises: UnsupportedModelError for an unknown dtype.
    """
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    found = config.get(key)
    if found is not None and found not in DTYPES:
        raise UnsupportedModelError(
            f"config.json: {key} = {reprlib.repr(found)} is not a supported dtype of weights (only {', '.join(DTYPES)})"
        )
    return found or default


def heads_of(config: Mapping[str, Any], *, head_dim: int | None = None) -> dict[str, Any]:
    """Read the heads of grouped-query attention; `head_dim` None defaults to hidden size divided by heads."""
    heads = integer_of(config, "num_attention_heads")
    share = integer_of(config, "hidden_size") // heads
    return {
        "num_heads": heads,
        "num_kv_heads": integer_of(config, "num_key_value_heads", heads),
        "head_dim": integer_of(config, "head_dim", head_dim or max(1, share)),
    }


def latent_attention_of(config: Mapping[str, Any], *, rope: RopeSpec | None) -> LatentAttention:
    """Read multi-head latent attention; `q_lora_rank` null projects queries from the hidden state.

    The latents' norms have their class's epsilon 1e-6, independent of `rms_norm_eps`.
    """
    nope_dim, rope_dim = integer_of(config, "qk_nope_head_dim"), integer_of(config, "qk_rope_head_dim")
    direct = config.get("q_lora_rank", 0) is None
    bias = flag_of(config, "attention_bias")
    return LatentAttention(
        num_heads=integer_of(config, "num_attention_heads"),
        q_lora_rank=None if direct else integer_of(config, "q_lora_rank"),
        kv_lora_rank=integer_of(config, "kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=integer_of(config, "v_head_dim"),
        rope=rope,
        bias=bias,
        output_bias=bias,
        score_scale=score_scale_of(config, nope_dim + rope_dim) if rope else None,
    )


def biased_sigmoid_router_of(
    config: Mapping[str, Any], *, scale: float, groups: tuple[int, int] = (1, 1), experts: str = "n_routed_experts"
) -> RouterSpec:
    """Read a router of sigmoid scores with a selection bias and expert groups (DeepSeek-V3, arXiv:2412.19437).

    `scale` and `groups` (number of groups, groups kept) are defaults; `experts` is the key of the number of experts.
    """
    num_groups, kept = integer_of(config, "n_group", groups[0]), integer_of(config, "topk_group", groups[1])
    if config.get(experts) is None and config.get("num_local_experts") is not None:
        experts = "num_local_experts"
    return grouped(
        RouterSpec(
            num_experts=integer_of(config, experts),
            top_k=integer_of(config, "num_experts_per_tok"),
            renormalize=flag_of(config, "norm_topk_prob", True),
            score="sigmoid",
            selection_bias=True,
            num_groups=num_groups,
            groups_kept=kept,
            group_score="top2_sum" if num_groups > 1 else "max",
            scale=number_of(config, "routed_scaling_factor", scale),
        )
    )


def grouped(router: RouterSpec) -> RouterSpec:
    """Return `router` after a check of its groups.

    Raises: UnsupportedModelError if groups differ in size, or the kept groups hold fewer than top_k experts.
    """
    size, rest = divmod(router.num_experts, router.num_groups)
    if router.top_k <= router.num_experts and (
        rest or not 1 <= router.groups_kept <= router.num_groups or router.groups_kept * size < router.top_k
    ):
        raise UnsupportedModelError(
            f"config.json: n_group = {router.num_groups} with topk_group = {router.groups_kept} does not fit "
            f"{router.num_experts} experts with num_experts_per_tok = {router.top_k}"
        )
    return router


def layers_of(
    config: Mapping[str, Any], mixer: str, *, dense: Collection[int] = (), windows: tuple[int, ...] = ()
) -> tuple[LayerSpec, ...]:
    """Return layers of the same mixer; those not in `dense` have experts, and empty `windows` means full attention."""
    return tuple(
        LayerSpec(mixer, "dense" if i in dense else "moe", windows[i] if windows else 0)
        for i in range(integer_of(config, "num_hidden_layers"))
    )


def first_layers_dense(config: Mapping[str, Any], *, default: int) -> tuple[int, ...]:
    """Return the layers without experts: by `mlp_layer_types`, else the first `first_k_dense_replace`."""
    num_layers = integer_of(config, "num_hidden_layers")
    if config.get("mlp_layer_types") is None:
        return tuple(range(min(num_layers, count_of(config, "first_k_dense_replace", default))))
    types = layer_types_of(config, "mlp_layer_types", "sparse dense")
    return tuple(i for i, kind in enumerate(types) if kind == "dense")


def layers_between_dense(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers without experts: those in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed = [] if config.get("mlp_only_layers") is None else config["mlp_only_layers"]
    if not isinstance(listed, list | tuple) or any(type(layer) is not int for layer in listed):
        raise UnsupportedModelError(f"config.json: mlp_only_layers must be a list of layers: {reprlib.repr(listed)}")
    dense, every = set(listed), integer_of(config, "decoder_sparse_step", 1)
    return tuple(i for i in range(integer_of(config, "num_hidden_layers")) if i in dense or (i + 1) % every != 0)


def attention_by_window(
    layers: tuple[LayerSpec, ...], full: GroupedAttention, windowed: GroupedAttention
) -> dict[str, Any]:
    """Return `layers` and `mixers` of a ModelSpec: attention is `full` without a window, else `windowed`.

    If both are equal, a single kind of mixer remains.
    """
    of_kind = {"gqa": full, "swa": replace(windowed, kind="swa")}
    if full != windowed:
        layers = tuple(replace(layer, mixer="swa" if layer.window else "gqa") for layer in layers)
    kinds = {layer.mixer for layer in layers}
    return {"layers": layers, "mixers": tuple(mixer for kind, mixer in of_kind.items() if kind in kinds)}


def windows_of(config: Mapping[str, Any], *, default: int, sliding: Sequence[int]) -> tuple[int, ...]:
    """Return the window of each layer in positions, 0 for full attention; empty if no layer has a window.

    Layers of type `sliding_attention` in `layer_types` have the window `sliding_window` (or `default`). Without
    `layer_types`, the layers in `sliding` have it.
    """
    num_layers = integer_of(config, "num_hidden_layers")
    if config.get("layer_types") is not None:
        types = layer_types_of(config, "layer_types", "full_attention sliding_attention")
        sliding = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if not sliding:
        return ()
    if config.get("sliding_window", default) is None:
        raise UnsupportedModelError("config.json: sliding_window is null, and layers have sliding attention")
    window = integer_of(config, "sliding_window", default)
    return tuple(window if i in sliding else 0 for i in range(num_layers))


def layer_types_of(config: Mapping[str, Any], key: str, known: str) -> list[str]:
    """Return the kind of each layer at `key`.

    Raises: UnsupportedModelError if a layer has none, or one that is not in `known`, which are separated by spaces.
    """
    types, num_layers = config[key], integer_of(config, "num_hidden_layers")
    if (
        not isinstance(types, list | tuple)
        or len(types) < num_layers
        or any(kind not in known.split() for kind in types)
    ):
        raise UnsupportedModelError(
            f"config.json: {key} must give each layer one of {known.split()}, found {reprlib.repr(types)}"
        )
    return list(types[:num_layers])


def layer_flags_of(config: Mapping[str, Any], key: str) -> list[int]:
    """Return the flag of each layer at `key`.

    Raises: UnsupportedModelError if a layer has none, or one that is not 0 or 1.
    """
    found, num_layers = config[key], integer_of(config, "num_hidden_layers")
    if not isinstance(found, list) or len(found) < num_layers or any(flag not in (0, 1) for flag in found):
        raise UnsupportedModelError(f"config.json: {key} must give each layer 0 or 1, found {reprlib.repr(found)}")
    return found[:num_layers]


def with_limits(
    layers: tuple[LayerSpec, ...], config: Mapping[str, Any], *, experts: str, mlp: str
) -> tuple[LayerSpec, ...]:
    """Return the layers with limits of their activations, read from the keys `experts` and `mlp`.

    Null and 0 mean none. Raises: UnsupportedModelError if a list does not give each layer a limit.
    """
    limits = zip(*(_limits(config, key, len(layers)) for key in (experts, mlp)), strict=True)
    return tuple(
        replace(layer, expert_limit=of_experts if layer.ffn == "moe" else 0.0, mlp_limit=of_mlp)
        for layer, (of_experts, of_mlp) in zip(layers, limits, strict=True)
    )


def _limits(config: Mapping[str, Any], key: str, num_layers: int) -> list[float]:
    found = [0] * num_layers if config.get(key) is None else config[key]
    if not isinstance(found, list) or len(found) < num_layers:
        raise UnsupportedModelError(f"config.json: {key} must give each layer a limit, found {reprlib.repr(found)}")
    return [amount_of({key: limit}, key) for limit in found[:num_layers]]


def experts_of(config: Mapping[str, Any], key: str, *, default: int) -> ExpertSpec:
    """Read experts of `moe_intermediate_size`, and a shared expert as wide as `key` of them; null or 0 means none."""
    width = integer_of(config, "moe_intermediate_size")
    num_shared = 0 if config.get(key, default) is None else count_of(config, key, default)
    return ExpertSpec(width, shared="plain" if num_shared else "none", shared_size=width * num_shared)


def latent_model_of(
    config: Mapping[str, Any], family: str, *, router: RouterSpec, num_dense: int, outline: Mapping[str, Any]
) -> ModelSpec:
    """Return a model of latent attention with shared experts; the first `num_dense` layers are dense by default."""
    return ModelSpec(
        family=family,
        **outline,
        layers=layers_of(config, "mla", dense=first_layers_dense(config, default=num_dense)),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(
            latent_attention_of(
                config, rope=rope_of(config, family, interleaved=flag_of(config, "rope_interleave", True))
            ),
        ),
        router=router,
        experts=experts_of(config, "n_shared_experts", default=1),
    )


def sparse_model_of(
    config: Mapping[str, Any],
    model: ModelSpec,
    *,
    heads: int,
    interleaved: bool,
    kinds: Sequence[str] = (),
) -> ModelSpec:
    """Return a model of latent attention with an index that chooses the tokens that each token sees.

    `heads` is the default number of index heads, `interleaved` the form of the index's rotation. `kinds` give each
    layer an index of its own (`full`), or the choice of the last layer that has one (`shared`); empty: all are `full`.
    """
    (mixer,) = model.mixers
    assert isinstance(mixer, LatentAttention), mixer
    index = TokenIndex(
        num_heads=integer_of(config, "index_n_heads", heads),
        head_dim=integer_of(config, "index_head_dim", 128),
        top_k=integer_of(config, "index_topk", 2048),
        interleaved=interleaved,
    )
    kinds = kinds or ["full"] * model.num_layers
    if kinds[0] != "full":
        raise UnsupportedModelError(
            "config.json: indexer_types: the first layer has no earlier one to share an index with"
        )
    mixers = {name: replace(mixer, index=index, kind=kind) for name, kind in INDEX_KINDS.items() if name in kinds}
    layers = tuple(replace(layer, mixer=INDEX_KINDS[kind]) for layer, kind in zip(model.layers, kinds, strict=True))
    return replace(model, layers=layers, mixers=tuple(mixers.values()))


def gated_delta_of(config: Mapping[str, Any], *, fused: str) -> GatedDelta:
    """Read gated delta layers; `fused` is the form of their projections in files."""
    return GatedDelta(
        num_key_heads=integer_of(config, "linear_num_key_heads", 16),
        num_value_heads=integer_of(config, "linear_num_value_heads", 32),
        key_dim=integer_of(config, "linear_key_head_dim", 128),
        value_dim=integer_of(config, "linear_value_head_dim", 128),
        num_taps=integer_of(config, "linear_conv_kernel_dim", 4),
        fused=fused,
    )


def hybrid_layers_of(
    config: Mapping[str, Any], *, linear: str, full: str, dense: Collection[int] = ()
) -> tuple[LayerSpec, ...]:
    """Return layers by `layer_types`, else with full attention in the last of each `full_attention_interval` layers.

    `linear` and `full` are the mixers of linear and full attention; layers not in `dense` have experts.
    """
    num_layers = integer_of(config, "num_hidden_layers")
    if config.get("layer_types") is not None:
        types = layer_types_of(config, "layer_types", "linear_attention full_attention")
        is_full = [kind == "full_attention" for kind in types]
    else:
        interval = integer_of(config, "full_attention_interval", 4)
        is_full = [(layer + 1) % interval == 0 for layer in range(num_layers)]
    if not any(is_full):
        raise UnsupportedModelError("config.json: layer_types has no full_attention: sequences would have no pages")
    return tuple(
        LayerSpec(full if is_full[layer] else linear, "dense" if layer in dense else "moe")
        for layer in range(num_layers)
    )


def hybrid_model_of(
    config: Mapping[str, Any],
    family: str,
    *,
    fused: str,
    renormalize: bool,
    dense: Collection[int] = (),
    dense_size: int = 0,
) -> ModelSpec:
    """Read a model of gated delta layers and gated attention, with a shared expert behind a gate.

    `fused` is the form of the projections in files, `dense` are the layers without experts.
    """
    heads = heads_of(config, head_dim=256)
    rotary_dim = rotary_dim_of(config, heads["head_dim"], default=heads["head_dim"] // 4) or heads["head_dim"]
    rope = rope_of(config, family, rotary_dim=rotary_dim)
    attention = GroupedAttention(**heads, qk_norm="head", output_gate="sigmoid", gate_form="in_query", rope=rope)
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
