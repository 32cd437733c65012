"""The small operations of a decoder layer by XLA: norms, products, rotary embedding, router scores."""

# T tokens   K experts per token   D model width   N dense layers   I dense width   h head width   r rotated elements
# E experts   V vocabulary

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from rayserve_moe.kernels.adapters import LayerAdapters, with_adapters
from rayserve_moe.kernels.reference.activations import SILU, Activation, activate

NO_ID = 2**31 - 1
"""Id of no token."""


def rms_norm(hidden: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square over the last dimension (in float32), then scale."""
    wide = hidden.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if scale.dtype != hidden.dtype:  # float32 scales, which rounding would change
        return (normed * scale).astype(hidden.dtype)
    return normed.astype(hidden.dtype) * scale


def layer_norm(hidden: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Norm to mean 0 and variance 1 over the last dimension, then scale and shift, all in float32."""
    wide = hidden.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(hidden.dtype)


def add_and_norm(
    hidden_TD: jax.Array, added_TD: jax.Array, scale_LD: jax.Array, *, layer: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Return a residual stream with `added_TD`, and the RMS norm of that with the scale of a layer, both [T, D]."""
    hidden_TD = hidden_TD + added_TD
    return hidden_TD, rms_norm(hidden_TD, scale_LD[layer], eps)


def project(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    name: str = "",
    adapters: LayerAdapters | None = None,
) -> jax.Array:
    """Multiply by [in, out], accumulating in float32; the result has the input's dtype.

    `adapters` of the parameter `name` are added before rounding.
    """
    made = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)
    out = with_adapters(made, hidden, name, adapters=adapters).astype(hidden.dtype)
    return out if bias is None else out + bias


def gated_mlp(
    hidden_TD: jax.Array,
    weights: tuple[jax.Array | None, jax.Array, jax.Array],
    *,
    layer: jax.Array,
    activation: Activation = SILU,
    names: tuple[str, str, str] = ("", "", ""),
    adapters: LayerAdapters | None = None,
) -> jax.Array:
    """Compute the gated MLP of a layer: float32 [T, D], a partial sum on a device that holds a part of I.

    `weights` are gate and up [N, D, I] and down [N, I, D] of all dense layers, `names` their names in `adapters`. The
    gate is None for an activation without one.
    """
    (gate_NDI, *others), (gate, up, down) = weights, names
    up_DI, down_ID = (stacked[layer] for stacked in others)
    gate_TI = None if gate_NDI is None else project(hidden_TD, gate_NDI[layer], name=gate, adapters=adapters)
    inner = activate(gate_TI, project(hidden_TD, up_DI, name=up, adapters=adapters), activation)
    made_TD = jnp.matmul(inner, down_ID, preferred_element_type=jnp.float32)
    return with_adapters(made_TD, inner, down, adapters=adapters)


SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


def router_scores(
    hidden_TD: jax.Array, router_DE: jax.Array, *, bias_E: jax.Array | None = None, score: str = "softmax"
) -> jax.Array:
    """Return softmax or sigmoid of the router's logits, computed in float32: [T, E]. KeyError for another `score`."""
    logits_TE = jnp.matmul(hidden_TD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST)
    return SCORES[score](logits_TE if bias_E is None else logits_TE + bias_E)


def total_of(weights_TK: jax.Array) -> jax.Array:
    """Return the sum of each token's weights [T, 1]. XLA may choose the order by the number of tokens."""
    return jnp.sum(weights_TK, axis=-1, keepdims=True)


def total_in_order(weights_TK: jax.Array) -> jax.Array:
    """Return the sum of each token's weights [T, 1], added from the first to the last for any number of tokens."""
    return reduce(operator.add, (weights_TK[:, k : k + 1] for k in range(weights_TK.shape[1])))


def head_logits(hidden_TD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Return float32 logits [T, V] over the rows of a head, or of the embedding table that it is tied to."""
    return jnp.einsum("SD,VD->SV", hidden_TD, head_VD, preferred_element_type=jnp.float32)


def take_rows(table_VD: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Return rows [T, D] of a table."""
    return table_VD[ids_T]


class WordMasses(NamedTuple):
    """Statistics of each row of logits [S]."""

    best_S: jax.Array
    """Largest logit, float32, at least the lowest finite number."""
    place_S: jax.Array
    """First place of the largest logit, int32; NO_ID if any logit is NaN."""
    mass_S: jax.Array
    """Sum over places of exp((logit - largest) / temperature), float32."""
    finite_S: jax.Array
    """1 if all logits of tokens are finite, else 0, int32."""
    log_mass_S: jax.Array
    """Logarithm of the sum, float32."""


def masses_of(logits_SV: jax.Array, temperature_S: jax.Array, num_words: jax.Array) -> WordMasses:
    """Return the masses of float32 logits; the first `num_words` (int32) belong to tokens, others are padding."""
    best_S, place_S = best_of(logits_SV, jnp.arange(logits_SV.shape[1], dtype=jnp.int32))
    best_S = jnp.maximum(best_S, jnp.finfo(jnp.float32).min)  # a part may be nothing but padding
    mass_S = jnp.exp((logits_SV - best_S[:, None]) / temperature_S[:, None]).sum(-1)
    is_fine_SV = jnp.isfinite(logits_SV) | (jnp.arange(logits_SV.shape[1]) >= num_words)
    return WordMasses(best_S, place_S, mass_S, jnp.all(is_fine_SV, axis=-1).astype(jnp.int32), jnp.log(mass_S))


def best_of(values_SC: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest value of each row, and its smallest id; NO_ID in rows with NaN.

    XLA:CPU takes ten times as long for a reduction of pairs (argmax) as for these two of numbers.
    """
    best_S = values_SC.max(axis=-1)
    return best_S, jnp.min(jnp.where(values_SC == best_S[:, None], ids, NO_ID), axis=-1)


def gumbel_noise(
    seed_S: jax.Array, choice_S: jax.Array, position_S: jax.Array, *, first: jax.Array, size: int
) -> jax.Array:
    """Return Gumbel noise [S, size] of samples for tokens from `first` on.

    It depends on the uint32 seed, choice and position of a row, and on the token, only. It equals a part of
    `jax.random.gumbel` over the whole vocabulary, to the last bit.
    """
    ids_V = first.astype(jnp.uint32) + jnp.arange(size, dtype=jnp.uint32)
    return gumbel_noise_of(ids_V, seed_S, choice_S, position_S)


def gumbel_noise_of(ids_V: jax.Array, seed_S: jax.Array, choice_S: jax.Array, position_S: jax.Array) -> jax.Array:
    """Return `gumbel_noise` [S, V] of arbitrary tokens."""
    ids_V = ids_V.astype(jnp.uint32)
    least = jnp.finfo(jnp.float32).tiny

    def of_row(seed: jax.Array, choice: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), choice), position)
        words_V = threefry2x32_p.bind(*jax.random.key_data(key), jnp.zeros_like(ids_V), ids_V)
        bits_V = (words_V[0] ^ words_V[1]) >> 9 | 0x3F800000
        uniform_V = jax.lax.bitcast_convert_type(bits_V, jnp.float32) - 1.0
        return -jnp.log(-jnp.log(jnp.maximum(least, uniform_V * (1.0 - least) + least)))

    return jax.vmap(of_row)(seed_S, choice_S, position_S)


class Rotation(NamedTuple):
    """Cosine and sine of every rotary angle, float32 [T, r / 2]: the same for all layers and heads."""

    cos: jax.Array
    sin: jax.Array


def rotation_of(positions_T: jax.Array, frequencies: np.ndarray, *, factor: float = 1.0) -> Rotation:
    """Turn by position * frequency: `frequencies` are float32 [r / 2]; `factor` multiplies cosine and sine."""
    angles = positions_T.astype(jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return Rotation(cos, sin) if factor == 1.0 else Rotation(cos * factor, sin * factor)


def rotate(heads_TXh: jax.Array, rotation: Rotation, *, interleaved: bool = False) -> jax.Array:
    """Rotate the first r elements of each head (Su et al., arXiv:2104.09864), in float32.

    Pairs are (i, i + r / 2), or (2 i, 2 i + 1) if `interleaved`. The other elements do not change.
    """
    width = 2 * rotation.cos.shape[1]
    rotated = _rotate_all(heads_TXh[..., :width], rotation, interleaved)
    rest = heads_TXh[..., width:]
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def _rotate_all(heads_TXr: jax.Array, rotation: Rotation, interleaved: bool) -> jax.Array:
    cos, sin = (angles_Tr[:, None] for angles_Tr in rotation)
    wide = heads_TXr.astype(jnp.float32)
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = jnp.stack(turned, axis=-1).reshape(wide.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    return joined.astype(heads_TXr.dtype)
