"""The sum of a residual stream and its norm in one TPU kernel, which reads a layer's scale in place.

XLA makes three operations of them, and each costs more to start than to compute for the tokens of a decode step.
"""

# T tokens   D model width   L layers   R rows of a block of scales

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MAX_ELEMENTS = 1 << 20
"""Maximum number of elements of a tile of tokens, which lie in the core's memory several times."""
TILE_ELEMENTS, MIN_TOKENS = 1 << 19, 16
"""Maximum number of elements of each of several tiles, and the rows of a register of 16-bit numbers."""
SCALE_ROWS = 16
"""Number of layers whose scales are read at once: the 16-bit rows of a register."""
VMEM_BYTES = 32 << 20


def add_and_norm(
    hidden_TD: jax.Array,
    added_TD: jax.Array,
    scale_LD: jax.Array,
    *,
    layer: jax.Array,
    eps: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute `layers.add_and_norm`, tile by tile for many tokens. A row has the same bits in any tile.

    `interpret` (see `pallas_call`) runs it without a TPU.
    """
    num_tokens, width = hidden_TD.shape
    tile = tile_tokens(num_tokens, width)
    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    rows = whole if tile == num_tokens else pl.BlockSpec((tile, width), lambda i, _: (i, 0))
    scale = scales_around(scale_LD)
    out = jax.ShapeDtypeStruct(hidden_TD.shape, hidden_TD.dtype)
    if not interpret:
        # XLA may otherwise bring the scales of all layers into the core's memory, in every layer.
        scale_LD = pltpu.with_memory_space_constraint(scale_LD, pltpu.HBM)
    made = pl.pallas_call(
        partial(_add_and_norm, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_tokens, tile),),
            in_specs=[scale, rows, rows],
            out_specs=[rows, rows],
        ),
        out_shape=[out, out],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        name="add_norm",
        interpret=interpret,
    )(jnp.asarray(layer, jnp.int32).reshape(1), scale_LD, hidden_TD, added_TD)
    total_TD, normed_TD = made
    return total_TD, normed_TD


def unsupported_reason(hidden_TD: jax.Array, *_: Any, **__: Any) -> str:
    """Return why `add_and_norm` does not take a call; empty if it does."""
    num_tokens, width = hidden_TD.shape
    if num_tokens * width > MAX_ELEMENTS:
        return f"{num_tokens} tokens of width {width} exceed {MAX_ELEMENTS} elements"
    return ""


def tile_tokens(num_tokens: int, width: int) -> int:
    """Return the tokens of a tile: all, or whole registers of them."""
    if num_tokens * width <= MAX_ELEMENTS:
        return num_tokens
    return max(MIN_TOKENS, TILE_ELEMENTS // width // MIN_TOKENS * MIN_TOKENS)


def scales_around(scale_LD: jax.Array) -> pl.BlockSpec:
    """Return a block of whole registers that includes the scale of a layer, the kernel's prefetched scalar."""
    rows = min(SCALE_ROWS, len(scale_LD))
    return pl.BlockSpec((rows, scale_LD.shape[1]), lambda _, layer_1: (jax.lax.div(layer_1[0], rows), 0))


def row_of(stacked_RD: jax.Array, row: jax.Array) -> jax.Array:
    """Return a row [1, D] in float32, inside a kernel: single rows of 16 bits cannot be addressed."""
    is_row_RD = jax.lax.broadcasted_iota(jnp.int32, stacked_RD.shape, 0) == row
    return jnp.sum(jnp.where(is_row_RD, stacked_RD.astype(jnp.float32), 0.0), axis=0, keepdims=True)


def sum_and_norm(
    hidden_TD: jax.Array, added_TD: jax.Array, scale: jax.Array, eps: float, *, is_wide: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return the sum and its norm with a float32 scale, inside a kernel.

    They are computed in float32 with the roundings of the reference, because not every core computes in bfloat16.
    `is_wide`: the scale is stored in float32, and the norm is not rounded ahead of it.
    """
    dtype = hidden_TD.dtype

    def rounded(wide_TD: jax.Array) -> jax.Array:
        return wide_TD.astype(dtype).astype(jnp.float32)

    wide_TD = rounded(hidden_TD.astype(jnp.float32) + added_TD.astype(jnp.float32))
    normed_TD = wide_TD * jax.lax.rsqrt(jnp.mean(wide_TD * wide_TD, axis=-1, keepdims=True) + eps)
    normed_TD = normed_TD if is_wide else rounded(normed_TD)
    return wide_TD.astype(dtype), (normed_TD * scale).astype(dtype)


def _add_and_norm(*refs: Any, eps: float) -> None:
    layer_1, scale, hidden, added, total, normed = refs
    scale_of_layer = row_of(scale[...], jax.lax.rem(layer_1[0], scale.shape[0]))
    is_wide = scale.dtype == jnp.float32
    total[...], normed[...] = sum_and_norm(hidden[...], added[...], scale_of_layer, eps, is_wide=is_wide)
