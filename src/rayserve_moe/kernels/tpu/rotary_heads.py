"""Norm and rotation of a layer's queries and keys in one TPU kernel, with keys and values in the order of the pool.

Each is one of many small operations where XLA computes them, and a layer of a decode step has little else to do.
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

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights, project_flat_rows, project_rows
from rayserve_moe.kernels.reference.layers import Rotation, project
from rayserve_moe.kernels.tpu.add_norm import row_of

HEAD_WIDTH = 128
MOST_ELEMENTS = 1 << 20
"""Elements of all heads that a kernel takes whole: they lie in the core's memory several times."""
MOST_TOKENS, LEAST_TOKENS, TILE_ELEMENTS = 256, 16, 2 << 20
"""Tokens of a tile where all are more than that, in whole registers of 16-bit numbers: a tile has work of its own."""
VMEM_BYTES = 40 << 20


def project_rows_at_once(  # noqa: PLR0913 (what the reference takes, by keyword)
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    *,
    rotation: Rotation,
    config: AttentionConfig,
    stacked: StackedWeights | None = None,
    is_flat: bool = False,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """As `project_rows`, and by it where the kernel does not know a knob of the model; as `project_flat_rows` where the
    pool's rows are flat.

    It knows heads of 128 with a norm each ahead of the rotation of all their elements, and no bias. Many tokens are
    taken tile by tile. `interpret` (see `pallas_call`) runs it without a TPU.
    """
    if not is_plain(weights, rotation, config):
        by_parts = project_flat_rows if is_flat else project_rows
        return by_parts(normed_TD, weights, rotation=rotation, config=config)
    projected = [project(normed_TD, weights[name]) for name in ("q_LDH", "k_LDG", "v_LDG")]
    all_weights, layer = stacked or ({name: weights[name][None] for name in ("q_norm_Lh", "k_norm_Lh")}, 0)
    norms = all_weights["q_norm_Lh"], all_weights["k_norm_Lh"]
    num_tokens, tile = len(normed_TD), tile_tokens(len(normed_TD), sum(part.shape[1] for part in projected))
    num_heads, num_kv = (matrix.shape[1] // HEAD_WIDTH for matrix in projected[:2])
    rows_shape = (1, 2 * num_kv * HEAD_WIDTH) if is_flat else (2 * num_kv, HEAD_WIDTH)
    given = [(num_heads, HEAD_WIDTH), rows_shape]
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
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in (of_tile[:1] if is_flat else of_tile)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL,), vmem_limit_bytes=VMEM_BYTES),
        name="rotary_heads",
        interpret=interpret,
    )(jnp.asarray(layer, jnp.int32).reshape(1), *by_token)
    return queries.reshape(num_tokens, -1, HEAD_WIDTH), rows if is_flat else rows.reshape(num_tokens, -1, HEAD_WIDTH)


def is_plain(weights: Mapping[str, jax.Array], rotation: Rotation, config: AttentionConfig) -> bool:
    """Whether the model has no knob that the kernel does not know."""
    knobs = AttentionConfig(HEAD_WIDTH, config.eps, config.plan, score_scale=config.score_scale, windows=config.windows)
    has_bias = any(name in weights for name in ("q_bias_LH", "k_bias_LG", "v_bias_LG"))
    is_whole = 2 * rotation.cos.shape[1] == HEAD_WIDTH
    return "q_norm_Lh" in weights and config == knobs and not has_bias and is_whole


def tile_tokens(num_tokens: int, num_elements: int) -> int:
    """Tokens of `num_elements` of all heads that a kernel has at once: all, or whole registers of them."""
    if num_tokens * num_elements <= MOST_ELEMENTS:
        return num_tokens
    most = TILE_ELEMENTS // num_elements // LEAST_TOKENS * LEAST_TOKENS
    return min(num_tokens, max(LEAST_TOKENS, min(most, MOST_TOKENS)))


def _turn(*refs: Any, eps: float) -> None:
    """Head by head; in 32 bits the rows of a head can be stored between those of others, which flat rows need not."""
    layer_1, queries, keys, values, q_norms, k_norms, cos, sin, out_queries, out_rows, wide_queries, *wide_rows = refs
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
        if wide_rows:
            wide_rows[0][pl.ds(place, num_tokens, stride=2 * num_kv), :] = row_Th
        else:
            out_rows[:, place * HEAD_WIDTH : (place + 1) * HEAD_WIDTH] = row_Th.astype(dtype)

    for i in range(num_heads):
        wide_queries[pl.ds(i, num_tokens, stride=num_heads), :] = turned(head(queries, i), q_norm_1h)
    for i in range(num_kv):
        put(2 * i, turned(head(keys, i), k_norm_1h))
        put(2 * i + 1, head(values, i))
    out_queries[...] = wide_queries[...].astype(dtype)
    if wide_rows:
        out_rows[...] = wide_rows[0][...].astype(dtype)
