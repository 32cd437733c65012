"""Choosing experts: top-k of the router's scores and their weights, in logical expert space and always in float32.

logits --score--> scores --bias, groups--> choice --top k--> ids --scores of the ids--> weights
"""

# T tokens   X tokens in prefill blocks, the last of T   D model width   E experts   K experts per token   G groups
# C experts of a group

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.kernels.operations import Kernel
from rayserve_moe.kernels.reference.layers import total_of
from rayserve_moe.kernels.row_blocks import ByRows, at_once
from rayserve_moe.kernels.tpu.top_experts import StackedRouter

MIN_TOTAL = 1e-20
"""DeepSeek-V3 adds this to a sum of sigmoids before it divides by the sum, since all may be zero."""


class RouterWeights(NamedTuple):
    """Float32 weights of a layer's router: the matrix, and the biases of logits and of the choice, if any.

    `stacked`: the weights of all layers, for kernels that read a layer in place. `factors_E` multiply the weights of
    experts. `rows_TD` are rows that the router reads in place of the experts' input.
    """

    matrix_DE: jax.Array
    logit_bias_E: jax.Array | None = None
    selection_bias_E: jax.Array | None = None
    stacked: StackedRouter | None = None
    factors_E: jax.Array | None = None
    rows_TD: jax.Array | None = None


def router_of_layer(stacked: StackedRouter) -> RouterWeights:
    """Return the router of the layer that `stacked` names."""
    matrix_MDE, *biases, layer = stacked
    of_layer = (None if bias_ME is None else bias_ME[layer] for bias_ME in biases)
    return RouterWeights(matrix_MDE[layer], *of_layer, stacked=stacked)


class ForcedExperts(NamedTuple):
    """Experts that replace the router's choice for the last X tokens of a step: ids [X, K] in their order, -1: none.

    `is_any`: bool scalar, True if any token of the step is forced. `gates_XK` replace the experts' weights, float32,
    NaN: none.
    """

    ids_XK: jax.Array
    is_any: jax.Array
    gates_XK: jax.Array | None = None


class ExpertScores(NamedTuple):
    """The router's scores, which become weights, and the scores that decide the choice; None: the same scores.

    -inf in `choice_TE` marks experts that may not be chosen. `lag_TG` is the score that each group lacks to be kept, 0
    or less for kept groups; None without groups.
    """

    scores_TE: jax.Array
    choice_TE: jax.Array | None = None
    lag_TG: jax.Array | None = None


def rank_experts(scores_TE: jax.Array, *, router: RouterSpec, selection_bias_E: jax.Array | None) -> ExpertScores:
    """Add the selection bias (arXiv:2408.15664), then exclude the groups that are not kept."""
    choice_TE = None if selection_bias_E is None else scores_TE + selection_bias_E
    if router.groups_kept < router.num_groups:
        return _within_best_groups(scores_TE, scores_TE if choice_TE is None else choice_TE, router)
    return ExpertScores(scores_TE, choice_TE)


def _within_best_groups(scores_TE: jax.Array, choice_TE: jax.Array, router: RouterSpec) -> ExpertScores:
    """Exclude experts outside of each token's best groups, ties to the smaller group.

    A group is as good as its best expert (DeepSeek-V2, arXiv:2405.04434) or its best two (V3, arXiv:2412.19437).
    """
    choice_TGC = choice_TE.reshape(len(choice_TE), router.num_groups, -1)
    num_best = {"max": 1, "top2_sum": 2}[router.group_score]
    best_TG = jnp.sum(jax.lax.top_k(choice_TGC, num_best)[0], axis=-1)
    values_TK, kept_TK = jax.lax.top_k(best_TG, router.groups_kept)
    is_kept_TG = jnp.any(kept_TK[..., None] == jnp.arange(router.num_groups), axis=1)
    choice_TE = jnp.where(is_kept_TG[..., None], choice_TGC, -jnp.inf).reshape(choice_TE.shape)
    return ExpertScores(scores_TE, choice_TE, values_TK[:, -1:] - best_TG)


def select_top_k(
    scores: ExpertScores,
    *,
    router: RouterSpec,
    forced: ForcedExperts | None = None,
    by_rows: ByRows = at_once,
    total: Kernel = total_of,
) -> tuple[jax.Array, jax.Array]:
    """Select the top k per token: ids int32 [T, K] by descending choice, ties to the smaller id; weights float32.

    Forced tokens take the given experts in the given order, weighted by their scores.
    """
    scores_TE, choice_TE = scores.scores_TE, scores.choice_TE
    if choice_TE is None:
        weights_TK, ids_TK = jax.lax.top_k(scores_TE, router.top_k)
    else:
        _, ids_TK = jax.lax.top_k(choice_TE, router.top_k)
        weights_TK = jnp.take_along_axis(scores_TE, ids_TK, axis=-1)
    if forced is not None:
        ids_XK = forced.ids_XK

        def force() -> tuple[jax.Array, jax.Array]:
            given_TK = jnp.pad(ids_XK, ((len(ids_TK) - len(ids_XK), 0), (0, 0)), constant_values=-1)
            forced_TK = jnp.where(given_TK >= 0, given_TK, ids_TK)
            return forced_TK, jnp.take_along_axis(scores_TE, forced_TK, axis=-1)

        ids_TK, weights_TK = jax.lax.cond(forced.is_any, force, lambda: (ids_TK, weights_TK))
    return ids_TK, by_rows(partial(gates_of, router=router, total=total), weights_TK)


def with_forced_gates(gates_TK: jax.Array, forced: ForcedExperts | None) -> jax.Array:
    """Return the weights of experts with the forced ones of the last tokens."""
    if forced is None or forced.gates_XK is None:
        return gates_TK
    gates_XK = forced.gates_XK

    def force() -> jax.Array:
        given_TK = jnp.pad(gates_XK, ((len(gates_TK) - len(gates_XK), 0), (0, 0)), constant_values=jnp.nan)
        return jnp.where(jnp.isnan(given_TK), gates_TK, given_TK)

    return jax.lax.cond(forced.is_any, force, lambda: gates_TK)


def gates_of(weights_TK: jax.Array, *, router: RouterSpec, total: Kernel = total_of) -> jax.Array:
    """Return the weights of a token's experts by their scores [T, K]."""
    if router.renormalize:
        weights_TK = weights_TK / _divisor(total(weights_TK), router)
    return weights_TK if router.scale == 1.0 else weights_TK * router.scale


def _divisor(total_T1: jax.Array, router: RouterSpec) -> jax.Array:
    """Return the divisor of weights: their sum, or the floor if that is larger (ERNIE 4.5's `moe_norm_min`)."""
    if router.renormalize_floor:
        return jnp.maximum(total_T1, router.renormalize_floor)
    return total_T1 + MIN_TOTAL if router.score == "sigmoid" else total_T1


def count_tokens(ids_TK: jax.Array, valid_T: jax.Array, *, num_experts: int) -> jax.Array:
    """Count the valid tokens each expert got: int32 [E]. Padding is not counted."""
    chosen_TKE = ids_TK[..., None] == jnp.arange(num_experts)
    return jnp.sum(chosen_TKE & valid_T[:, None, None], axis=(0, 1), dtype=jnp.int32)
