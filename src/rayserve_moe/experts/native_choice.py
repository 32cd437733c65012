"""Router's own choice beside the computed experts, for audits of forced routing."""

# T tokens   E experts   K experts per token   G groups

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.routing import ExpertScores

_TINY = np.finfo(np.float32).tiny
_BELOW_ONE = 1.0 - np.finfo(np.float32).epsneg


class NativeChoice(NamedTuple):
    """Choice of the router by the states that the computed experts have led to."""

    ids_TK: jax.Array
    """Experts that the router would compute, int32."""
    margin_T: jax.Array
    """float32: the amount that the computed experts lack to be the router's choice, or, if they are its choice, the
    distance of its last expert from the next one. In logits; in scores with a selection bias, and for excluded groups.
    """
    rank_T: jax.Array
    """int32: rank of the worst computed expert in the router's order, from 1; k if the two choices are the same."""


def native_choice(scores: ExpertScores, ids_TK: jax.Array, *, router: RouterSpec) -> NativeChoice:
    """Return the router's choice and its distance from the computed experts `ids_TK`."""
    choice_TE = scores.scores_TE if scores.choice_TE is None else scores.choice_TE
    _, native_TK = jax.lax.top_k(choice_TE, router.top_k)
    values_TE = _deciding_values(scores, router)
    is_native_TE, is_computed_TE = (_members(ids, router.num_experts) for ids in (native_TK, ids_TK))
    lowest_T = jnp.min(jnp.where(is_native_TE, values_TE, jnp.inf), axis=1)
    tie_T = lowest_T - jnp.max(jnp.where(is_native_TE, -jnp.inf, values_TE), axis=1)
    displaced_T = jnp.max(jnp.where(is_native_TE & ~is_computed_TE, values_TE, -jnp.inf), axis=1)
    lag_TE = displaced_T[:, None] - values_TE
    if scores.lag_TG is not None:
        of_groups_TE = jnp.repeat(scores.lag_TG, router.num_experts // router.num_groups, axis=1)
        lag_TE = jnp.where(choice_TE == -jnp.inf, of_groups_TE, lag_TE)
    intruder_TE = is_computed_TE & ~is_native_TE
    lag_T = jnp.max(jnp.where(intruder_TE, lag_TE, -jnp.inf), axis=1)
    worst_T = jnp.min(jnp.where(intruder_TE, choice_TE, jnp.inf), axis=1)
    is_same_T = ~jnp.any(intruder_TE, axis=1)
    rank_T = 1 + jnp.sum(choice_TE > worst_T[:, None], axis=1, dtype=jnp.int32)
    rank_T = jnp.where(is_same_T, router.top_k, jnp.maximum(rank_T, router.top_k + 1))  # tied scores have no order
    return NativeChoice(native_TK, jnp.where(is_same_T, tie_T, lag_T), rank_T)


def _deciding_values(scores: ExpertScores, router: RouterSpec) -> jax.Array:
    """Return the values that decide the choice: logits, or scores with their bias; -inf for excluded experts."""
    if router.selection_bias:
        return scores.scores_TE if scores.choice_TE is None else scores.choice_TE
    clipped_TE = jnp.clip(scores.scores_TE, _TINY, _BELOW_ONE)
    logits_TE = jnp.log(clipped_TE)
    if router.score == "sigmoid":
        logits_TE -= jnp.log1p(-clipped_TE)
    return logits_TE if scores.choice_TE is None else jnp.where(scores.choice_TE == -jnp.inf, -jnp.inf, logits_TE)


def _members(ids_TK: jax.Array, num_experts: int) -> jax.Array:
    """Return flags of the experts in `ids_TK`, bool [T, E]."""
    return jnp.any(ids_TK[..., None] == jnp.arange(num_experts), axis=1)
