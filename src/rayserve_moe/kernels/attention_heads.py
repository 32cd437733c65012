"""Queries, keys and values of a layer: projected, normed, bounded and rotated."""

# T tokens   D model width   H query heads * h   G KV heads * h   X heads   h head width   v value width

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.kv_pool import kv_rows
from rayserve_moe.kernels.reference.layers import Rotation, project, rms_norm, rotate
from rayserve_moe.kernels.tpu.packed_rows import packed_kv


class StackedWeights(NamedTuple):
    """Weights of all layers by name, and the number of a layer."""

    of_layers: Mapping[str, jax.Array]
    layer: jax.Array


def project_heads(
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    *,
    rotation: Rotation,
    config: AttentionConfig,
    adapters: LayerAdapters | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values of this device's heads, [T, heads, h] each, values [T, heads, v].

    `weights` are the layer's, under the names of `model.parameters`. Norms and biases may be absent; a norm covers each
    head by itself, or all heads of all devices together. Without a matrix of values, values are the projected keys.
    """
    queries, keys, values = (
        project(normed_TD, weights[matrix], weights.get(bias), name=matrix, adapters=adapters).reshape(
            len(normed_TD), -1, width
        )
        for matrix, bias, width in (
            ("q_LDH", "q_bias_LH", config.head_dim),
            ("k_LDG", "k_bias_LG", config.head_dim),
            ("v_LDG" if "v_LDG" in weights else "k_LDG", "v_bias_LG", config.value_width),
        )
    )
    if config.norms_values:
        values = rms_norm(values, jnp.ones(config.value_width, values.dtype), config.eps)
    if not config.norms_after_rotation:
        queries, keys = _norm_queries_and_keys(queries, keys, weights, config)
    if config.clip is not None:
        queries, keys, values = (jnp.clip(heads, -config.clip, config.clip) for heads in (queries, keys, values))
    if config.value_scale != 1.0:
        values = (values.astype(jnp.float32) * config.value_scale).astype(values.dtype)
    queries, keys = (rotate(heads, rotation, interleaved=config.interleaved_rotation) for heads in (queries, keys))
    if config.norms_after_rotation:
        queries, keys = _norm_queries_and_keys(queries, keys, weights, config)
    return queries, keys, values


def project_rows(  # noqa: PLR0913 (weights in several forms)
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    *,
    rotation: Rotation,
    config: AttentionConfig,
    stacked: StackedWeights | None = None,
    adapters: LayerAdapters | None = None,
    rows_of: Callable[[jax.Array, jax.Array], jax.Array] = kv_rows,
) -> tuple[jax.Array, jax.Array]:
    """Return queries [T, heads, h], and rows of the pool: by `kv_pool.kv_rows` [T, KV heads, h + v].

    `stacked` holds the weights of all layers, for kernels that read a layer in place.
    """
    del stacked
    queries, keys, values = project_heads(normed_TD, weights, rotation=rotation, config=config, adapters=adapters)
    return queries, rows_of(keys, values)


project_packed_rows = partial(project_rows, rows_of=packed_kv)
"""With keys and values as a pool of packed rows has them, [T, X] (see `packed_rows.packed_kv`)."""


def _norm_queries_and_keys(
    queries: jax.Array, keys: jax.Array, weights: Mapping[str, jax.Array], config: AttentionConfig
) -> tuple[jax.Array, jax.Array]:
    if "q_norm_Lh" in weights:
        return rms_norm(queries, weights["q_norm_Lh"], config.eps), rms_norm(keys, weights["k_norm_Lh"], config.eps)
    if "q_norm_LH" in weights:
        return _norm_whole(queries, weights["q_norm_LH"], config), _norm_whole(keys, weights["k_norm_LG"], config)
    return queries, keys


def _norm_whole(heads_TXh: jax.Array, scale: jax.Array, config: AttentionConfig) -> jax.Array:
    """Compute `rms_norm` over the heads of all devices of the tensor axis.

    Devices hold equally many heads. KV heads that lie on several devices lie on equally many each, so the mean over
    devices is the mean over heads.
    """
    wide = heads_TXh.astype(jnp.float32).reshape(len(heads_TXh), -1)
    mean_T1 = jnp.mean(wide * wide, axis=-1, keepdims=True)
    if config.plan is not None:
        mean_T1 = config.plan.sum_over_tensor(mean_T1) / config.plan.tensor_size
    normed = wide * jax.lax.rsqrt(mean_T1 + config.eps)
    return (normed.astype(heads_TXh.dtype) * scale).reshape(heads_TXh.shape)
