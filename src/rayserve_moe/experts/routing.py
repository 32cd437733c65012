"""Choosing experts: scores, top-k and weights, in logical expert space and always in float32."""

# T tokens   D model width   E experts   K experts per token

from __future__ import annotations

import jax
import jax.numpy as jnp


def select_experts(
    hidden_TD: jax.Array, router_DE: jax.Array, *, top_k: int, renormalize: bool
) -> tuple[jax.Array, jax.Array]:
    """Pick `top_k` experts per token: ids int32 [T, K] by descending score, ties to the smaller id; weights float32."""
    logits_TE = jnp.matmul(hidden_TD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST)
    return best_experts(logits_TE, top_k=top_k, renormalize=renormalize)


def best_experts(logits_TE: jax.Array, *, top_k: int, renormalize: bool) -> tuple[jax.Array, jax.Array]:
    """Pick by float32 router logits [T, E]; returns ids and weights as `select_experts` does."""
    weights_TK, ids_TK = jax.lax.top_k(jax.nn.softmax(logits_TE, axis=-1), top_k)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdims=True)
    return ids_TK, weights_TK


def count_tokens(ids_TK: jax.Array, valid_T: jax.Array, *, num_experts: int) -> jax.Array:
    """Count the valid tokens each expert got: int32 [E]. Padding is not counted."""
    chosen_TKE = ids_TK[..., None] == jnp.arange(num_experts)
    return jnp.sum(chosen_TKE & valid_T[:, None, None], axis=(0, 1), dtype=jnp.int32)
