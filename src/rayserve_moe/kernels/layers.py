"""The small operations of a decoder layer by XLA: norms, products, rotary embedding, router scores."""

# T tokens   D model width   N dense layers   I dense width   h head width   E experts   V vocabulary

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


def rms_norm(hidden: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square over the last dimension (in float32), then scale."""
    wide = hidden.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(hidden.dtype) * scale


def project(hidden: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Multiply by [in, out], accumulating in float32; the result has the input's dtype."""
    out = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32).astype(hidden.dtype)
    return out if bias is None else out + bias


def gated_mlp(hidden_TD: jax.Array, weights: tuple[jax.Array, jax.Array, jax.Array], *, layer: jax.Array) -> jax.Array:
    """SiLU-gated MLP of one layer: float32 [T, D], on a device that holds part of I a partial sum.

    `weights` are gate and up [N, D, I] and down [N, I, D] of all dense layers.
    """
    gate_DI, up_DI, down_ID = (stacked[layer] for stacked in weights)
    inner = jax.nn.silu(project(hidden_TD, gate_DI)) * project(hidden_TD, up_DI)
    return jnp.matmul(inner, down_ID, preferred_element_type=jnp.float32)


def router_scores(hidden_TD: jax.Array, router_DE: jax.Array) -> jax.Array:
    """Softmax of the router's logits, computed in float32: [T, E]."""
    logits_TE = jnp.matmul(hidden_TD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.softmax(logits_TE, axis=-1)


def head_logits(hidden_TD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Float32 logits [T, V] over the rows of a head, or of the embedding table that it is tied to."""
    return jnp.einsum("SD,VD->SV", hidden_TD, head_VD, preferred_element_type=jnp.float32)


def take_rows(table_VD: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Rows [T, D] of a table."""
    return table_VD[ids_T]


class Rotation(NamedTuple):
    """Cosine and sine of every rotary angle, float32 [T, h / 2]: the same for all layers and heads."""

    cos: jax.Array
    sin: jax.Array


def rotation_of(positions_T: jax.Array, *, width: int, theta: float) -> Rotation:
    """Angles of rotary embedding for heads of `width`: position * theta ** (-2 i / h)."""
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions_T.astype(jnp.float32)[:, None] * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(heads_TXh: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotary embedding in half-split pairs (i, i + h / 2), computed in float32. Su et al., arXiv:2104.09864."""
    cos, sin = (angles_Th[:, None] for angles_Th in rotation)
    first, second = jnp.split(heads_TXh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(heads_TXh.dtype)
