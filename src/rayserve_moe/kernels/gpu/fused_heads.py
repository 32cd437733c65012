"""Norm and rotation of heads, and the write to the pool, in one Triton kernel between products and attention.

XLA compiles these operations to about ten kernels a layer, whose launches take longer than their work.
"""

# T tokens   D model width   X query heads + KV heads   G KV heads   h head width   v value width   r rotated elements
# L layers   M tokens of a program

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.gpu.blocks import at_rows, cdiv, parts_of, power_of_two
from rayserve_moe.kernels.reference.layers import Rotation, project

ROWS = 8
"""Tokens of a program."""
MATRICES = (("q_LDH", "q_bias_LH"), ("k_LDG", "k_bias_LG"), ("v_LDG", "v_bias_LG"))


class HeadSizes(NamedTuple):
    """Sizes of a call."""

    num_heads: int
    width: int
    values: int
    rotated: int
    eps: float
    has_norms: bool
    rows: int


def unsupported_reason(
    _: jax.Array,
    weights: Mapping[str, jax.Array],
    kv_pages: jax.Array,
    *,
    rotation: Rotation,
    config: AttentionConfig,
    **__: Any,
) -> str:
    """Return why `project_and_write` does not take a call; empty if it does."""
    width, rotated = config.head_dim, 2 * rotation.cos.shape[1]
    if config.clip is not None or config.value_scale != 1.0 or config.norms_values:
        return "keys or values are clipped, scaled or normed"
    if config.norms_after_rotation or "q_norm_LH" in weights:
        return "norms follow the rotation, or cover all heads at once"
    if config.interleaved_rotation:
        return "neighbouring elements rotate"
    if "v_LDG" not in weights:
        return "values are keys"
    if 0 < sum(bias in weights for _, bias in MATRICES) < len(MATRICES):
        return "some projections have biases"
    if any(size & (size - 1) for size in (rotated // 2, width - rotated)):
        return f"{rotated} of {width} elements rotate, which are no powers of two"
    return "" if kv_pages.ndim == 4 else "the pool has other rows"


def project_and_write(  # noqa: PLR0913 (weights in several forms)
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    kv_pages: jax.Array,
    *,
    slots_T: jax.Array,
    rotation: Rotation,
    config: AttentionConfig,
    stacked: StackedWeights,
    products: Callable[..., jax.Array],
    adapters: LayerAdapters | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return queries [T, heads, h], and the pool [N, page, G, h + v] with keys and values at `slots_T`.

    As `attention_heads.project_rows`, then `kv_pool.write_rows`. `products` multiplies tokens with a layer of stacked
    matrices. `interpret` (see `pallas_call`) runs it without a GPU.
    """
    flat = _products(normed_TD, weights, stacked, products, adapters)
    num_tokens, width = len(normed_TD), config.head_dim
    num_kv, num_heads = kv_pages.shape[2], stacked.of_layers["q_LDH"].shape[2] // width
    pool = kv_pages.reshape(-1, *kv_pages.shape[2:])
    norms = [stacked.of_layers[name] for name in ("q_norm_Lh", "k_norm_Lh") if name in stacked.of_layers]
    sizes = HeadSizes(
        num_heads,
        width,
        config.value_width,
        2 * rotation.cos.shape[1],
        config.eps,
        has_norms=bool(norms),
        rows=min(ROWS, power_of_two(num_tokens)),
    )
    layer_1 = jnp.reshape(stacked.layer, (1,)).astype(jnp.int32)
    angles = [*rotation] if sizes.rotated else []
    inputs = [layer_1, slots_T.astype(jnp.int32), flat, *angles, *norms, pool]
    queries, pool = pl.pallas_call(
        partial(_norm_rotate_write, sizes=sizes),
        grid=(cdiv(num_tokens, sizes.rows), num_heads + num_kv),
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, num_heads * width), normed_TD.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(inputs) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="gpu_fused_heads",
    )(*inputs)
    return queries.reshape(num_tokens, num_heads, width), pool.reshape(kv_pages.shape)


def _products(
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    stacked: StackedWeights,
    products: Callable[..., jax.Array],
    adapters: LayerAdapters | None,
) -> jax.Array:
    """Return queries, keys and values as they are projected, with biases and adapters, [T, heads of all * width]."""
    if adapters is not None:
        made = (
            project(normed_TD, weights[matrix], weights.get(bias), name=matrix, adapters=adapters)
            for matrix, bias in MATRICES
        )
        return jnp.concatenate([*made], axis=1)
    made = products(normed_TD, [stacked.of_layers[matrix] for matrix, _ in MATRICES], stacked.layer)
    biases = [weights[bias] for _, bias in MATRICES if bias in weights]
    rounded = made.astype(normed_TD.dtype)
    return rounded + jnp.concatenate(biases) if len(biases) == len(MATRICES) else rounded


def _norm_rotate_write(*refs: Any, sizes: HeadSizes) -> None:
    """Norm and rotate a head of some tokens; a KV head is written to the pool, with its values."""
    layer_1, slots_T, flat, *others, _, out, pool = refs
    num_angles = 2 if sizes.rotated else 0
    rotation, norms = others[:num_angles], others[num_angles:]
    head = pl.program_id(1)
    # The last program may have too many tokens: it computes the last one several times.
    tokens = jnp.minimum(pl.program_id(0) * sizes.rows + jnp.arange(sizes.rows), slots_T.shape[0] - 1)
    half = sizes.rotated // 2
    angles = [plgpu.load(at_rows(each, tokens, first=0, size=half)) for each in rotation]
    finish = partial(_norm_and_rotate, angles=angles, sizes=sizes)

    keys_at = sizes.num_heads * sizes.width
    values_at = keys_at + pool.shape[1] * sizes.width

    def load(at: jax.Array) -> list[jax.Array]:
        return [plgpu.load(at_rows(flat, tokens, first=at + start, size=size)) for start, size in _spans(sizes)]

    def scales(number: int) -> list[jax.Array]:
        return [plgpu.load(norms[number].at[layer_1[0], pl.ds(*span)]) for span in _spans(sizes)] if norms else []

    @pl.when(head < sizes.num_heads)
    def _() -> None:
        at = head * sizes.width
        parts = finish(load(at), scales(0))
        for (start, _), part in zip(_spans(sizes), parts, strict=True):
            plgpu.store(at_rows(out, tokens, first=at + start, size=part.shape[1]), part.astype(out.dtype))

    @pl.when(head >= sizes.num_heads)
    def _() -> None:
        own = head - sizes.num_heads
        slots = plgpu.load(slots_T.at[tokens])
        parts = finish(load(keys_at + own * sizes.width), scales(1))
        for (start, _), part in zip(_spans(sizes), parts, strict=True):
            plgpu.store(at_rows(pool, slots, own, first=start, size=part.shape[1]), _stored(part, pool.dtype))
        for start, size in parts_of(sizes.values):
            part = plgpu.load(at_rows(flat, tokens, first=values_at + own * sizes.values + start, size=size))
            plgpu.store(at_rows(pool, slots, own, first=sizes.width + start, size=size), _stored(part, pool.dtype))


def _spans(sizes: HeadSizes) -> list[tuple[int, int]]:
    """Return start and size of the parts of a head: both halves that rotate, and the rest."""
    half, rest = sizes.rotated // 2, sizes.width - sizes.rotated
    return [(start, size) for start, size in ((0, half), (half, half), (2 * half, rest)) if size]


def _norm_and_rotate(
    parts: list[jax.Array], scales: list[jax.Array], *, angles: list[jax.Array], sizes: HeadSizes
) -> list[jax.Array]:
    """Return the parts of a head [M, size], normed if there are scales, and rotated; rounded as by the reference."""
    dtype = parts[0].dtype
    if scales:
        squares = [jnp.sum(jnp.square(part.astype(jnp.float32)), axis=1) for part in parts]
        factor = jax.lax.rsqrt(sum(squares[1:], squares[0]) / sizes.width + sizes.eps)
        parts = [_scaled(part, factor, scale) for part, scale in zip(parts, scales, strict=True)]
    if not angles:
        return parts
    (cos, sin), (first, second, *others) = angles, parts
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    return [(first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype), *others]


def _scaled(part: jax.Array, factor: jax.Array, scale: jax.Array) -> jax.Array:
    """Return a part times the factor of its token and the scales of its elements, as `layers.rms_norm` rounds."""
    normed = part.astype(jnp.float32) * factor[:, None]
    if scale.dtype != part.dtype:
        return (normed * scale[None, :]).astype(part.dtype)
    return normed.astype(part.dtype) * scale[None, :]


def _stored(part: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return elements in the dtype of the pool; beyond the range of 8 bits they are its largest number."""
    if dtype.itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        part = jnp.clip(part.astype(jnp.float32), -largest, largest)
    return part.astype(dtype)
