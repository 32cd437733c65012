"""Specs of one-layer draft models that read hidden states of their target: EAGLE, EAGLE3, multi-token prediction.

At each position a draft takes a feature of the target and the embedding of the next token, and returns a feature from
which the head predicts the token after that. Applied to its own features, it drafts further ahead.
"""

# D model width   A width of the target's features in files   V words of the draft's head

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rayserve_moe.model.config_parts import heads_of, outline_of
from rayserve_moe.model.config_rope import rope_of
from rayserve_moe.model.config_values import flag_of, integer_of, object_of, refuse_other_values
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.table import MIXERS
from rayserve_moe.model.param_spec import TRANSPOSED, ParamSpec, norm_spec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import NO_PART, LayerSpec, ModelSpec, UnsupportedModelError

HEAD = "lm_head.weight"
EAGLE_TENSORS = {
    **{role: f"self_attn.{role}_proj.weight" for role in ("q", "k", "v", "o")},
    **{f"{role}_bias": f"self_attn.{role}_proj.bias" for role in ("q", "k", "v")},
    **{f"dense_{role}": f"mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "hidden_norm": "hidden_norm.weight",
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    "draft_norm": "norm.weight",
    "head": HEAD,
}
"""Suffixes of tensor names; exporters prepend `midlayer.`, `layers.0.` or `model.`."""
MAP = "d2t"
"""Tensor with the offset from a draft token id to the target's token id."""
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
EAGLE_IGNORED = ("*d2t", "*t2d", "*embed_tokens.weight")
PREDICTION_TENSORS = {
    "embedding_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "fc": "eh_proj.weight",
    "draft_norm": "shared_head.norm.weight",
}
"""Tensors of a prediction layer that an ordinary layer lacks."""


@dataclass(frozen=True)
class DraftSpec:
    """Draft model."""

    algorithm: str
    layer: ModelSpec
    """Its decoder layer; `vocab_size` counts the ids of the draft's head."""
    aux_layers: tuple[int, ...] = ()
    """Target layers whose inputs are concatenated into the feature; empty: the target's normed last hidden state."""
    norms_residual: bool = False
    """True if the residual stream begins with the normed feature."""
    recycles_normed: bool = False
    """True if further drafts read the head's input, False if they read the stream before its norm."""
    has_head: bool = False
    """True if the draft has its own head, else it uses the target's."""
    maps_words: bool = False
    """True if the files number the draft's vocabulary differently from the target's."""
    fc_bias: bool = False


def eagle_spec(config: Mapping[str, Any], target: ModelSpec, *, algorithm: str, names: Collection[str]) -> DraftSpec:
    """Read the `config.json` of an EAGLE or EAGLE3 head with tensors `names`.

    Raises: UnsupportedModelError that names the key.
    """
    family = algorithm.lower()
    never = dict.fromkeys(("fc_norm", "norm_before_fc", "mlp_bias"), (False,))
    refuse_other_values(config, family, hidden_act=("silu",), num_hidden_layers=(1,), **never)
    given = object_of(config, "eagle_config")
    refuse_other_values(given, family, norm_before_fc=(False,), use_aux_hidden_state=(algorithm == "EAGLE3",))
    if integer_of(config, "target_hidden_size", target.hidden_size) != target.hidden_size:
        raise UnsupportedModelError("config.json: target_hidden_size belongs to another target")
    if integer_of(config, "hidden_size") != target.hidden_size:
        raise UnsupportedModelError(f"config.json: hidden_size must be the target's, {target.hidden_size}")
    has_bias = any(name.endswith(EAGLE_TENSORS["q_bias"]) for name in names)
    outline = outline_of(config, norm_eps=1e-6, max_positions=2048)
    layer = ModelSpec(
        family=family,
        **outline,
        layers=(LayerSpec(GroupedAttention.kind, "dense"),),
        dense_intermediate_size=integer_of(config, "intermediate_size"),
        mixers=(GroupedAttention(**heads_of(config), rope=rope_of(config, family), bias=has_bias),),
        router=target.router,
        experts=replace(target.experts, shared="none", shared_size=0, separate_norms=False, activation="silu"),
    )
    layer = replace(layer, tie_embeddings=False)
    if layer.vocab_size != target.vocab_size:
        raise UnsupportedModelError(f"config.json: vocab_size must be the target's, {target.vocab_size}")
    if algorithm == "EAGLE":
        has_fc_bias = any(name.endswith(EAGLE_TENSORS["fc_bias"]) for name in names)
        return DraftSpec(algorithm, layer, recycles_normed=True, fc_bias=has_fc_bias)
    words = integer_of(config, "draft_vocab_size", target.vocab_size)
    maps_words = MAP in names
    if words != target.vocab_size and not maps_words:
        raise UnsupportedModelError(f"config.json: draft_vocab_size = {words} needs a tensor {MAP}")
    return DraftSpec(
        algorithm,
        replace(layer, vocab_size=words),
        aux_layers=_aux_layers(config, given, target.num_layers),
        norms_residual=flag_of(config, "norm_before_residual"),
        recycles_normed=flag_of(config, "norm_output"),
        has_head=maps_words or any(name.endswith(EAGLE_TENSORS["head"]) for name in names),
        maps_words=maps_words,
    )


def _aux_layers(config: Mapping[str, Any], given: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are concatenated; by default a low, a middle and a high layer.

    `eagle_config` lists layers by their outputs (SpecForge, SGLang), the top level by their inputs (vLLM).
    """
    left, entered = given.get(AUX_KEY), config.get(AUX_KEY)
    found, shift = (left, 1) if left else (entered or [2, num_layers // 2, num_layers - 3], 0)
    if type(found) is not list or not all(type(i) is int and 0 <= i + shift <= num_layers for i in found):
        raise UnsupportedModelError(
            f"config.json: {AUX_KEY} must list layers from {-shift} to {num_layers - shift}, found {str(found)[:80]}"
        )
    if len(set(found)) != len(found):
        raise UnsupportedModelError(
            f"config.json: {AUX_KEY} must be given, each layer once, for {num_layers} layers, found {str(found)[:80]}"
        )
    return tuple(i + shift for i in found)


def prediction_spec(target: ModelSpec) -> DraftSpec:
    """Return the multi-token prediction layer of a target (DeepSeek-V3, arXiv:2412.19437, 2.2).

    It has experts, without limits, and the target's attention, also if other layers are recurrent, or take a choice of
    tokens from an earlier layer.
    """
    attending = (
        each
        for each in reversed(target.layers)
        if each.mixer != NO_PART
        and target.mixer(each.mixer).score_shape() is not None
        and not MIXERS[each.mixer].needs_earlier_layers
    )
    kind = replace(next(attending).kind, ffn="moe", expert_limit=0.0, mlp_limit=0.0)
    layer = replace(target, layers=(kind,), mixers=(target.mixer(kind.mixer),))
    return DraftSpec("NEXTN", layer, recycles_normed=True)


def eagle_rules(names: Collection[str]) -> dict[str, str]:
    """Return tensor names by role, with the prefixes of these files."""

    def spelled(end: str) -> str:
        return next((name for name in names if name == end or name.endswith(f".{end}")), end)

    return {role: spelled(end) for role, end in EAGLE_TENSORS.items()}


def prediction_rules(
    rules: Mapping[str, str], layer: int, *, tensors: Mapping[str, str] = PREDICTION_TENSORS
) -> dict[str, str]:
    """Return tensor names by role of a prediction layer, by the rules of its family.

    `tensors` are the ends of the names that an ordinary layer lacks.

    Raises: UnsupportedModelError for a family whose layers have other names.
    """
    prefix = rules["attention_norm"].removesuffix("input_layernorm.weight")
    if prefix == rules["attention_norm"]:
        raise UnsupportedModelError("the prediction layer of this family is not read (speculative_algorithm NEXTN)")
    own = {role: prefix + end for role, end in tensors.items()}
    return {role: name.replace("{layer}", str(layer)) for role, name in {**rules, **own}.items()}


def draft_parameters(draft: DraftSpec, *, dtype: str, **held: Any) -> dict[str, dict[str, ParamSpec]]:
    """Return the parameters of a draft model; keywords are as for `parameter_specs`.

    Its projections are replicated on every device. The target's embedding, final norm and shared head are not included.
    """
    spec, (mixer,) = draft.layer, draft.layer.mixers
    tree = parameter_specs(spec, dtype=dtype, **held)
    embedding = tree.pop("embedding")
    width, num_joined = spec.hidden_size, len(draft.aux_layers) or 2

    def norm(role: str) -> ParamSpec:
        return norm_spec(spec.norm_offset, (width,), ("model",), role, dtype=spec.norm_dtype(dtype))

    own = {"fc_AD": ParamSpec((num_joined * width, width), dtype, ("model", "model"), "fc", file=TRANSPOSED)}
    if draft.algorithm == "EAGLE3":
        own |= {"hidden_norm_D": norm("hidden_norm"), "norm_D": norm("draft_norm")}
        tree[mixer.kind] = {name: _widened(name, param) for name, param in tree[mixer.kind].items()}
    elif draft.algorithm == "NEXTN":
        own |= {
            "embedding_norm_D": norm("embedding_norm"),
            "hidden_norm_D": norm("hidden_norm"),
            "norm_D": norm("draft_norm"),
        }
    else:
        del tree[mixer.kind]["norm_LD"]
        own |= {"fc_bias_D": ParamSpec((width,), dtype, ("model",), "fc_bias")} if draft.fc_bias else {}
    if draft.has_head:
        own["head_VD"] = embedding["head_VD"]
    return tree | {"draft": own}


def _widened(name: str, param: ParamSpec) -> ParamSpec:
    """Return an attention parameter for an input of double width: embedding and feature.

    The output keeps the double width with zeros in its second half, because kernels return as many elements as they
    take.
    """
    layers, *shape = param.shape
    if name in ("q_LDH", "k_LDG", "v_LDG"):
        return replace(param, shape=(layers, 2 * shape[0], shape[1]))
    if name == "o_LHD":
        return replace(param, shape=(layers, shape[0], 2 * shape[1]), padding=(("model", shape[1]),))
    return param
