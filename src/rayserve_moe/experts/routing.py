"""Choosing experts: top-k of the router's scores and their weights, in logical expert space and always in float32."""

# T tokens   X tokens in prefill blocks, the last of T   E experts   K experts per token

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ForcedExperts(NamedTuple):
    """Experts that replace the router's choice for the last X tokens of a step: ids [X, K] in their order, -1: none.

    `is_any`: whether any token of the step is forced.
    """

    ids_XK: jax.Array
    is_any: jax.Array


def select_top_k(
    scores_TE: jax.Array, *, top_k: int, renormalize: bool, forced: ForcedExperts | None = None
) -> tuple[jax.Array, jax.Array]:
    """Select `top_k` experts per token: ids int32 [T, K] by descending score, ties to the smaller id; weights float32.

    Forced tokens take the given experts in the given order, weighted by their scores.
    """
    weights_TK, ids_TK = jax.lax.top_k(scores_TE, top_k)
    if forced is not None:
        ids_XK = forced.ids_XK

        def force() -> tuple[jax.Array, jax.Array]:
            given_TK = jnp.pad(ids_XK, ((len(ids_TK) - len(ids_XK), 0), (0, 0)), constant_values=-1)
            forced_TK = jnp.where(given_TK >= 0, given_TK, ids_TK)
            return forced_TK, jnp.take_along_axis(scores_TE, forced_TK, axis=-1)

        ids_TK, weights_TK = jax.lax.cond(forced.is_any, force, lambda: (ids_TK, weights_TK))
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdims=True)
    return ids_TK, weights_TK


def count_tokens(ids_TK: jax.Array, valid_T: jax.Array, *, num_experts: int) -> jax.Array:
    """Count the valid tokens each expert got: int32 [E]. Padding is not counted."""
    chosen_TKE = ids_TK[..., None] == jnp.arange(num_experts)
    return jnp.sum(chosen_TKE & valid_T[:, None, None], axis=(0, 1), dtype=jnp.int32)
