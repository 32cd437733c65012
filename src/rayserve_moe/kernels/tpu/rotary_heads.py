"""Norm and rotation of a layer's queries and keys in one TPU kernel, with keys and values in the order of the pool.

XLA makes many small operations of them, and a layer of a decode step consists of little else.
"""

# T tokens   D model width   H query heads * h   G KV heads * h   X heads   h head width   r = h / 2

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.reference.layers import Rotation, project
from rayserve_moe.kernels.tpu.add_norm import row_of

HEAD_WIDTH = 128
MAX_ELEMENTS = 1 << 20
"""Maximum number of elements of all heads in a single tile; they lie in the core's memory several times."""
MAX_TOKENS, MIN_TOKENS, TILE_ELEMENTS = 256, 16, 2 << 20
"""Bounds of a tile's tokens if there are several tiles (whole registers of 16-bit numbers), and of its elements."""
VMEM_BYTES = 40 << 20


def project_rows_at_once(  # noqa: PLR0913 (the interface of `project_rows`)
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    *,
    rotation: Rotation,
    config: AttentionConfig,
    stacked: StackedWeights | None = None,
    adapters: LayerAdapters | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute `project_packed_rows` for heads that `unsupported_reason` accepts.

    Many tokens are computed tile by tile. `interpret` (see `pallas_call`) runs it without a TPU.
    """
    projected = [
        project(normed_TD, weights[name], name=name, adapters=adapters) for name in ("q_LDH", "k_LDG", "v_LDG")
    ]
    all_weights, layer = stacked or ({name: weights[name][None] for name in ("q_norm_Lh", "k_norm_Lh")}, 0)
    norms = all_weights["q_norm_Lh"], all_weights["k_norm_Lh"]
    num_tokens, tile = len(normed_TD), tile_tokens(len(normed_TD), sum(part.shape[1] for part in projected))
    num_heads, num_kv = (matrix.shape[1] // HEAD_WIDTH for matrix in projected[:2])
    given = [(num_heads, HEAD_WIDTH), (1, 2 * num_kv * HEAD_WIDTH)]
    of_tile = [(tile * rows, lanes) for rows, lanes in given]

    def tiles(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i: (i, 0))

    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    by_token = [*projected, *norms, *rotation]
    specs = [whole if array is norms[0] or array is norms[1] else tiles((tile, array.shape[1])) for array in by_token]
    queries, rows = pl.pallas_call(
        partial(_turn, eps=config.eps),
        grid=(pl.cdiv(num_tokens, tile),),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *specs],
        out_specs=[tiles(shape) for shape in of_tile],
        out_shape=[jax.ShapeDtypeStruct((num_tokens * rows, lanes), normed_TD.dtype) for rows, lanes in given],
        scratch_shapes=[pltpu.VMEM(of_tile[0], jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL,), vmem_limit_bytes=VMEM_BYTES),
        name="rotary_heads",
        interpret=interpret,
    )(jnp.asarray(layer, jnp.int32).reshape(1), *by_token)
    return queries.reshape(num_tokens, -1, HEAD_WIDTH), rows


def unsupported_reason(
    _: jax.Array, weights: Mapping[str, jax.Array], *, rotation: Rotation, config: AttentionConfig, **__: Any
) -> str:
    """Return why the kernel does not take heads of this kind; empty if it does.

    It takes heads of 128 rotating elements, with a norm for each head ahead of the rotation and no bias.
    """
    if config.head_dim != HEAD_WIDTH:
        return f"heads of {config.head_dim} elements, not {HEAD_WIDTH}"
    if config.value_width != HEAD_WIDTH:
        return f"values of {config.value_width} elements, not {HEAD_WIDTH}"
    if config.value_scale != 1.0:
        return "values are scaled"
    if 2 * rotation.cos.shape[1] != HEAD_WIDTH:
        return f"{2 * rotation.cos.shape[1]} of {HEAD_WIDTH} elements rotate"
    if "q_norm_Lh" not in weights:
        return "heads have no norm each"
    if any(name in weights for name in ("q_bias_LH", "k_bias_LG", "v_bias_LG")):
        return "projections have biases"
    if "v_LDG" not in weights or config.norms_values:
        return "values are keys, or normed"
    if config.interleaved_rotation:
        return "neighbouring elements rotate"
    if config.norms_after_rotation:
        return "norms follow the rotation"
    return "" if config.clip is None else "queries, keys and values are clipped"


def tile_tokens(num_tokens: int, num_elements: int) -> int:
    """Return the tokens of a tile, with `num_elements` of all heads each: all, or whole registers of them."""
    if num_tokens * num_elements <= MAX_ELEMENTS:
        return num_tokens
    most = TILE_ELEMENTS // num_elements // MIN_TOKENS * MIN_TOKENS
    return min(num_tokens, max(MIN_TOKENS, min(most, MAX_TOKENS)))


def _turn(*refs: Any, eps: float) -> None:
    """Compute head by head. Queries are stored between rows of other heads, which takes rows of 32 bits."""
    layer_1, queries, keys, values, q_norms, k_norms, cos, sin, out_queries, out_rows, wide_queries = refs
    q_norm_1h, k_norm_1h = (row_of(norms[...], layer_1[0]) for norms in (q_norms, k_norms))
    num_tokens, dtype = queries.shape[0], out_queries.dtype
    num_heads, num_kv = (ref.shape[1] // HEAD_WIDTH for ref in (queries, keys))
    cos_Th = jnp.concatenate([cos[...], cos[...]], axis=1)
    sin_Th = jnp.concatenate([-sin[...], sin[...]], axis=1)

    def head(ref: Any, i: int) -> jax.Array:
        return ref[:, i * HEAD_WIDTH : (i + 1) * HEAD_WIDTH].astype(jnp.float32)

    def rounded(wide_Th: jax.Array) -> jax.Array:
        return wide_Th.astype(dtype).astype(jnp.float32)

    def turned(head_Th: jax.Array, scale_1h: jax.Array) -> jax.Array:
        mean_T1 = jnp.mean(head_Th * head_Th, axis=-1, keepdims=True)
        normed_Th = rounded(rounded(head_Th * jax.lax.rsqrt(mean_T1 + eps)) * scale_1h)
        return normed_Th * cos_Th + pltpu.roll(normed_Th, HEAD_WIDTH // 2, 1) * sin_Th

    def put(place: int, row_Th: jax.Array) -> None:
        out_rows[:, place * HEAD_WIDTH : (place + 1) * HEAD_WIDTH] = row_Th.astype(dtype)

    for i in range(num_heads):
        wide_queries[pl.ds(i, num_tokens, stride=num_heads), :] = turned(head(queries, i), q_norm_1h)
    for i in range(num_kv):
        put(2 * i, turned(head(keys, i), k_norm_1h))
        put(2 * i + 1, head(values, i))
    out_queries[...] = wide_queries[...].astype(dtype)
