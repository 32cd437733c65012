"""Draft models of one layer that read the hidden states of their target: EAGLE, EAGLE3, and multi-token prediction.

All of them take, at the position of a token, a feature of the target there and the embedding of the token after it,
and give a feature of their own, of which the head makes the token after that. Applied to their own features they draft
further ahead.
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
from rayserve_moe.model.param_spec import TRANSPOSED, ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import LayerSpec, ModelSpec, UnsupportedModelError

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
"""The ends of names: exporters put `midlayer.`, `layers.0.` or `model.` in front of them."""
MAP = "d2t"
"""What to add to a word of the draft for the target's word."""
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
EAGLE_IGNORED = ("*d2t", "*t2d", "*embed_tokens.weight")
PREDICTION_TENSORS = {
    "embedding_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "fc": "eh_proj.weight",
    "draft_norm": "shared_head.norm.weight",
}
"""What a prediction layer has besides what every layer has."""


@dataclass(frozen=True)
class DraftSpec:
    """One draft model. `layer` is its decoder layer; the words of its vocabulary are those of the draft's head.

    `aux_layers` are layers of the target whose inputs are joined to its feature; none: its normed last hidden state.
    `norms_residual`: the residual stream begins with the normed feature. `recycles_normed`: further drafts are made of
    what the head is given, not of the stream before its norm. `has_head`: it has one of its own, else the target's;
    `maps_words`: of words that files number in another way than the target.
    """

    algorithm: str
    layer: ModelSpec
    aux_layers: tuple[int, ...] = ()
    norms_residual: bool = False
    recycles_normed: bool = False
    has_head: bool = False
    maps_words: bool = False
    fc_bias: bool = False


def eagle_spec(config: Mapping[str, Any], target: ModelSpec, *, algorithm: str, names: Collection[str]) -> DraftSpec:
    """Read the `config.json` of an EAGLE or EAGLE3 head with tensors `names`. UnsupportedModelError names the key."""
    family = algorithm.lower()
    never = dict.fromkeys(("fc_norm", "norm_before_fc", "mlp_bias"), (False,))
    refuse_other_values(config, family, hidden_act=("silu",), num_hidden_layers=(1,), **never)
    given = object_of(config, "eagle_config")
    refuse_other_values(given, family, norm_before_fc=(False,), use_aux_hidden_state=(algorithm == "EAGLE3",))
    if integer_of(config, "target_hidden_size", target.hidden_size) != target.hidden_size:
        raise UnsupportedModelError("config.json: target_hidden_size is that of another target")
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
        experts=replace(target.experts, shared="none", shared_size=0),
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
    """Layers whose inputs are joined: low, in the middle and high.

    Within `eagle_config` they are named by what leaves them (SpecForge, SGLang), beside it by what enters (vLLM).
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
    """The layer for multi-token prediction behind a target's last one (DeepSeek-V3, arXiv:2412.19437, 2.2)."""
    mixer = target.mixer(target.layers[-1].mixer)
    layer = replace(target, layers=(LayerSpec(mixer.kind, "moe"),), mixers=(mixer,))
    return DraftSpec("NEXTN", layer, recycles_normed=True)


def eagle_rules(names: Collection[str]) -> dict[str, str]:
    """Names of tensors by role, as these files spell them."""

    def spelled(end: str) -> str:
        return next((name for name in names if name == end or name.endswith(f".{end}")), end)

    return {role: spelled(end) for role, end in EAGLE_TENSORS.items()}


def prediction_rules(rules: Mapping[str, str], layer: int) -> dict[str, str]:
    """The same of a prediction layer, by the rules of its family."""
    prefix = rules["attention_norm"].removesuffix("input_layernorm.weight")
    own = {role: prefix + end for role, end in PREDICTION_TENSORS.items()}
    return {role: name.replace("{layer}", str(layer)) for role, name in {**rules, **own}.items()}


def draft_parameters(draft: DraftSpec, *, dtype: str, **held: Any) -> dict[str, dict[str, ParamSpec]]:
    """State all parameters of a draft model, `held` as `parameter_specs` takes it; its projections are whole on every
    device. Embedding, final norm and head of the target are not among them, nor is a head that has its words."""
    spec, (mixer,) = draft.layer, draft.layer.mixers
    tree = parameter_specs(spec, dtype=dtype, **held)
    embedding = tree.pop("embedding")
    width, num_joined = spec.hidden_size, len(draft.aux_layers) or 2

    def vector(role: str, initial: str = "ones") -> ParamSpec:
        return ParamSpec((width,), dtype, ("model",), role, initial=initial)

    own = {"fc_AD": ParamSpec((num_joined * width, width), dtype, ("model", "model"), "fc", file=TRANSPOSED)}
    if draft.algorithm == "EAGLE3":
        own |= {"hidden_norm_D": vector("hidden_norm"), "norm_D": vector("draft_norm")}
        tree[mixer.kind] = {name: _widened(name, param) for name, param in tree[mixer.kind].items()}
    elif draft.algorithm == "NEXTN":
        own |= {
            "embedding_norm_D": vector("embedding_norm"),
            "hidden_norm_D": vector("hidden_norm"),
            "norm_D": vector("draft_norm"),
        }
    else:
        del tree[mixer.kind]["norm_LD"]
        own |= {"fc_bias_D": vector("fc_bias", "normal")} if draft.fc_bias else {}
    if draft.has_head:
        own["head_VD"] = embedding["head_VD"]
    return tree | {"draft": own}


def _widened(name: str, param: ParamSpec) -> ParamSpec:
    """A parameter of an attention whose input is twice as wide: embedding and feature.

    What it adds to the stream is not: the other half of its output is zeros, since kernels give as much as they take.
    """
    layers, *shape = param.shape
    if name in ("q_LDH", "k_LDG", "v_LDG"):
        return replace(param, shape=(layers, 2 * shape[0], shape[1]))
    if name == "o_LHD":
        return replace(param, shape=(layers, shape[0], 2 * shape[1]), padding=(("model", shape[1]),))
    return param
