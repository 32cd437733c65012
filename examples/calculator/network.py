"""The model as it is trained: the served one's function, over whole rows, differentiable, on one device."""

# B rows   T tokens of a row   N = B * T   D model width   V vocabulary   L layers   H heads   G KV heads   h head width
# E experts   K experts per token   P picks = N * K   C places of an expert   F expert width

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.routing import ExpertScores, select_top_k
from rayserve_moe.kernels.reference.layers import project, rms_norm, rotate, rotation_of, router_scores
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec

Weights = dict[str, dict[str, jax.Array]]
EMBEDDING_SCALE = 0.5
UNSEEN = -1e30
RESIDUAL_OUTPUTS = ("o", "expert_down")


class Scores(NamedTuple):
    """Logits [B, T, V], and how unevenly experts were loaded: one per layer for even loads, E for all on one; and what
    enters each layer, and leaves the last [B, T, D]."""

    logits_BTV: jax.Array
    unevenness: jax.Array
    entering: tuple[jax.Array, ...] = ()


def initial_weights(spec: ModelSpec, *, seed: int) -> Weights:
    """Draw the weights in float32, in the tree of the served model. The head is zero."""
    generator = jax.random.key(seed)
    weights: Weights = {}
    for number, (group, name, param) in enumerate(_parameters(spec)):
        values = _initial(param, jax.random.fold_in(generator, number), spec)
        weights.setdefault(group, {})[name] = values
    return weights


def _parameters(spec: ModelSpec) -> list[tuple[str, str, ParamSpec]]:
    tree = parameter_specs(spec, dtype="float32")
    return [(group, name, param) for group, members in tree.items() for name, param in members.items()]


def _initial(param: ParamSpec, key: jax.Array, spec: ModelSpec) -> jax.Array:
    if param.initial == "ones":
        return jnp.ones(param.shape)
    if param.role == "head":
        return jnp.zeros(param.shape)
    scale = EMBEDDING_SCALE if param.role == "embedding" else param.shape[-2] ** -0.5
    if param.role in RESIDUAL_OUTPUTS:
        scale /= math.sqrt(2 * spec.num_layers)
    return scale * jax.random.normal(key, param.shape)


def score(weights: Weights, ids_BT: jax.Array, segments_BT: jax.Array, *, spec: ModelSpec, places: int) -> Scores:
    """Score the token after each one. An expert computes its first `places` tokens and skips the others.

    A token sees earlier ones of its segment; those of segment -1 are padding.
    """
    (rows, width), eps = ids_BT.shape, spec.norm_eps
    causal_TT = jnp.tril(jnp.ones((width, width), bool))
    seen_BTT = causal_TT & (segments_BT[:, :, None] == segments_BT[:, None, :])
    valid_N = segments_BT.reshape(-1) >= 0
    hidden_BTD = weights["embedding"]["table_VD"][ids_BT]
    unevenness, entering = jnp.zeros(()), []
    for layer in range(spec.num_layers):
        entering.append(hidden_BTD)
        attention = {name: values[layer] for name, values in weights["gqa"].items()}
        experts = {name: values[layer] for name, values in weights["experts"].items()}
        hidden_BTD += _attend(rms_norm(hidden_BTD, attention["norm_LD"], eps), attention, seen_BTT, spec)
        normed_ND = rms_norm(hidden_BTD, weights["mlp_norm"]["scale"][layer], eps).reshape(rows * width, -1)
        out_ND, layer_unevenness = apply_experts(normed_ND, experts, valid_N, spec=spec, places=places)
        hidden_BTD += out_ND.reshape(hidden_BTD.shape)
        unevenness += layer_unevenness
    embedding = weights["embedding"]
    logits_BTV = project(rms_norm(hidden_BTD, embedding["final_norm_D"], eps), embedding["head_VD"].T)
    return Scores(logits_BTV, unevenness, (*entering, hidden_BTD))


def attention_of(spec: ModelSpec) -> GroupedAttention:
    """Return the knobs of the attention of all layers."""
    (own,) = spec.mixers
    assert isinstance(own, GroupedAttention), own
    return own


def _attend(hidden_BTD: jax.Array, weights: dict[str, jax.Array], seen_BTT: jax.Array, spec: ModelSpec) -> jax.Array:
    (rows, width, _), attention = hidden_BTD.shape, attention_of(spec)
    rotation = rotation_of(jnp.arange(width), rope_frequencies(attention.rope, attention.head_dim))

    def heads_of(name: str) -> jax.Array:
        return project(hidden_BTD, weights[name]).reshape(rows, width, -1, attention.head_dim)

    queries = rotate(rms_norm(heads_of("q_LDH"), weights["q_norm_Lh"], spec.norm_eps), rotation)
    keys = rotate(rms_norm(heads_of("k_LDG"), weights["k_norm_Lh"], spec.norm_eps), rotation)
    # The R query heads of a KV head stand below each other, so that every product is a plain batch of matrices.
    grouped = queries.reshape(rows, width, attention.num_kv_heads, -1, attention.head_dim).transpose(0, 2, 3, 1, 4)
    scores = jnp.einsum("BGRTh,BSGh->BGRTS", grouped, keys) * attention.head_dim**-0.5
    shares = jax.nn.softmax(scores + jnp.where(seen_BTT, 0.0, UNSEEN)[:, None, None], axis=-1)
    attended = jnp.einsum("BGRTS,BSGh->BTGRh", shares, heads_of("v_LDG"))
    return project(attended.reshape(rows, width, -1), weights["o_LHD"])


def apply_experts(
    hidden_ND: jax.Array, weights: dict[str, jax.Array], valid_N: jax.Array, *, spec: ModelSpec, places: int
) -> tuple[jax.Array, jax.Array]:
    """Sum the chosen experts' outputs, each expert multiplying one block of `places` rows; and the unevenness."""
    router, top_k = spec.router, spec.router.top_k
    scores_NE = router_scores(hidden_ND, weights["router_MDE"])
    ids_NK, shares_NK = select_top_k(ExpertScores(scores_NE), router=router)
    chosen_PE = (ids_NK.reshape(-1, 1) == jnp.arange(router.num_experts)) & jnp.repeat(valid_N, top_k)[:, None]
    rank_P = jnp.sum((jnp.cumsum(chosen_PE, axis=0) - 1) * chosen_PE, axis=1)
    is_placed_P = chosen_PE.any(1) & (rank_P < places)
    nowhere = router.num_experts * places
    place_P = jnp.where(is_placed_P, ids_NK.reshape(-1) * places + rank_P, nowhere)
    pick_of_place = jnp.full(nowhere, top_k * len(hidden_ND)).at[place_P].set(jnp.arange(len(place_P)), mode="drop")
    rows_ECD = hidden_ND.at[pick_of_place // top_k].get(mode="fill", fill_value=0)
    rows_ECD = rows_ECD.reshape(router.num_experts, places, -1)
    inner_ECF = jax.nn.silu(rows_ECD @ weights["gate_MPDF"]) * (rows_ECD @ weights["up_MPDF"])
    results = (inner_ECF @ weights["down_MPFD"]).reshape(nowhere, -1)
    picked_NKD = results.at[place_P].get(mode="fill", fill_value=0).reshape(*ids_NK.shape, -1)
    return jnp.einsum("NKD,NK->ND", picked_NKD, shares_NK), _unevenness(hidden_ND, weights, chosen_PE, valid_N)


def _unevenness(
    hidden_ND: jax.Array, weights: dict[str, jax.Array], chosen_PE: jax.Array, valid_N: jax.Array
) -> jax.Array:
    """The balance loss of Switch (Fedus et al., arXiv:2101.03961): E * sum of load share times mean probability."""
    probabilities_NE = jax.nn.softmax(hidden_ND @ weights["router_MDE"], axis=-1) * valid_N[:, None]
    loads_E, mass_E = chosen_PE.sum(0), probabilities_NE.sum(0)
    return loads_E.size * jnp.sum(loads_E / loads_E.sum() * mass_E / mass_E.sum())
