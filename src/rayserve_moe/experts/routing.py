"""Choosing experts: scores, top-k and weights, in logical expert space and always in float32."""

# T tokens   X tokens in prefill blocks, the last of T   D model width   E experts   K experts per token

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.cpu_native import calls


class ForcedPicks(NamedTuple):
    """Experts that the last X tokens of a step are to take: ids [X, K] in the order wanted, -1: the router is free.

    `is_any`: whether any token of the step is forced.
    """

    ids_XK: jax.Array
    is_any: jax.Array


def select_experts(
    hidden_TD: jax.Array,
    router_DE: jax.Array,
    *,
    top_k: int,
    renormalize: bool,
    forced: ForcedPicks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Pick `top_k` experts per token: ids int32 [T, K] by descending score, ties to the smaller id; weights float32.

    Forced tokens take the experts that they are told, in the order that they are told, weighted by their scores.
    """
    scores_TE = router_scores(hidden_TD, router_DE)
    return best_of_scores(scores_TE, top_k=top_k, renormalize=renormalize, forced=forced)


def router_scores(hidden_TD: jax.Array, router_DE: jax.Array, *, is_native: bool = False) -> jax.Array:
    """What the router thinks of every expert: float32 [T, E]. Whatever limits its choice is a score of -inf.

    `is_native`: they come from the native CPU kernel.
    """
    if is_native:
        return calls.router_scores(hidden_TD, router_DE)
    logits_TE = jnp.matmul(hidden_TD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.softmax(logits_TE, axis=-1)


def best_experts(logits_TE: jax.Array, *, top_k: int, renormalize: bool) -> tuple[jax.Array, jax.Array]:
    """Pick by float32 router logits [T, E]; returns ids and weights as `select_experts` does."""
    return best_of_scores(jax.nn.softmax(logits_TE, axis=-1), top_k=top_k, renormalize=renormalize)


def best_of_scores(
    scores_TE: jax.Array, *, top_k: int, renormalize: bool, forced: ForcedPicks | None = None
) -> tuple[jax.Array, jax.Array]:
    """Pick by `router_scores`; returns ids and weights as `select_experts` does."""
    weights_TK, ids_TK = jax.lax.top_k(scores_TE, top_k)
    if forced is not None:
        ids_XK = forced.ids_XK

        def force() -> tuple[jax.Array, jax.Array]:
            told_TK = jnp.pad(ids_XK, ((len(ids_TK) - len(ids_XK), 0), (0, 0)), constant_values=-1)
            forced_TK = jnp.where(told_TK >= 0, told_TK, ids_TK)
            return forced_TK, jnp.take_along_axis(scores_TE, forced_TK, axis=-1)

        ids_TK, weights_TK = jax.lax.cond(forced.is_any, force, lambda: (ids_TK, weights_TK))
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdims=True)
    return ids_TK, weights_TK


def count_tokens(ids_TK: jax.Array, valid_T: jax.Array, *, num_experts: int) -> jax.Array:
    """Count the valid tokens each expert got: int32 [E]. Padding is not counted."""
    chosen_TKE = ids_TK[..., None] == jnp.arange(num_experts)
    return jnp.sum(chosen_TKE & valid_T[:, None, None], axis=(0, 1), dtype=jnp.int32)
