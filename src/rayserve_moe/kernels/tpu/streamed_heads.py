"""The begin of a layer in one TPU kernel, for few tokens: residual sum, norm, and projection of queries, keys, values.

Weights of a layer are read in place, a block of columns while the previous block is multiplied. A block yields whole
heads, whose norm and rotation follow at once. If two cores share a device, each computes half of the heads.
"""

# T tokens   D model width   H query heads * h   G KV heads * h   h head width   W columns of a block   X lanes of a row

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.tpu.add_norm import row_of, scales_around, sum_and_norm
from rayserve_moe.kernels.tpu.paged_attention import cores_of_device
from rayserve_moe.kernels.tpu.rotary_heads import HEAD_WIDTH, MAX_ELEMENTS
from rayserve_moe.kernels.tpu.rotary_heads import unsupported_reason as unsupported_heads

BLOCK_BYTES = 2 << 20
"""Maximum size of a block of columns: as much as memory delivers while a block is multiplied. A core has two."""
MAX_BUFFER_BYTES = 8 << 20
VMEM_BYTES = 40 << 20
MATRICES = ("q_LDH", "k_LDG", "v_LDG")


@dataclass(frozen=True)
class StreamShape:
    """The part of a call that a core computes."""

    num_cores: int
    num_tokens: int
    width: int
    """Width of the model."""
    num_heads: int
    """Query heads of a core."""
    num_kv: int
    """KV heads of a core."""
    block_heads: int
    """Query heads of a block of columns."""
    dtype: Any

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of query heads."""
        return self.num_heads // self.block_heads

    @property
    def buffer_heads(self) -> int:
        """Return the number of heads with columns in a buffer."""
        return max(self.block_heads, self.num_kv)


def norm_and_project(
    hidden_TD: jax.Array,
    added_TD: jax.Array,
    stacked: StackedWeights,
    *,
    rotation: Rotation,
    config: AttentionConfig,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `project_streamed` with the norms `norm_LD` of `stacked`, for calls that `unsupported_reason` accepts.

    `interpret` (see `pallas_call`) runs it without a TPU.
    """
    shape = stream_shape(len(hidden_TD), stacked.of_layers, num_cores=cores_of_device(interpret))
    return project_streamed(hidden_TD, added_TD, stacked, rotation, shape=shape, eps=config.eps, interpret=interpret)


def unsupported_reason(
    hidden_TD: jax.Array,
    _: jax.Array,
    stacked: StackedWeights,
    *,
    rotation: Rotation,
    config: AttentionConfig,
    interpret: Any = False,
) -> str:
    """Return why `norm_and_project` does not take a call; empty if it does."""
    weights, (num_tokens, width) = stacked.of_layers, hidden_TD.shape
    if reason := unsupported_heads(hidden_TD, weights, rotation=rotation, config=config):
        return reason
    num_elements = max(width, sum(weights[name].shape[2] for name in MATRICES))
    if num_tokens * num_elements > MAX_ELEMENTS:
        return f"{num_tokens} tokens of {num_elements} elements exceed {MAX_ELEMENTS} elements"
    return unsupported_shape(weights, num_cores=cores_of_device(interpret))


def unsupported_shape(weights: Mapping[str, jax.Array], *, num_cores: int) -> str:
    """Return why the cores of a device cannot share weights [L, D, heads * h]; empty if they can."""
    num_heads, num_kv = (weights[name].shape[2] // HEAD_WIDTH for name in MATRICES[:2])
    if num_heads % num_cores or num_kv % num_cores:
        return f"{num_heads} query heads and {num_kv} KV heads do not divide over {num_cores} cores"
    buffer_bytes = _buffer_bytes(stream_shape(1, weights, num_cores=num_cores))
    if buffer_bytes > MAX_BUFFER_BYTES:
        return f"the columns of a buffer take {buffer_bytes >> 20} of {MAX_BUFFER_BYTES >> 20} MiB"
    return ""


def stream_shape(num_tokens: int, weights: Mapping[str, jax.Array], *, num_cores: int) -> StreamShape:
    """Return the part of each core for weights [L, D, heads * h]."""
    (width, columns), kv_columns = weights["q_LDH"].shape[1:], weights["k_LDG"].shape[2]
    num_heads, num_kv = columns // HEAD_WIDTH // num_cores, kv_columns // HEAD_WIDTH // num_cores
    head_bytes = width * HEAD_WIDTH * weights["q_LDH"].dtype.itemsize
    fitting = [
        heads for heads in range(1, num_heads + 1) if num_heads % heads == 0 and heads * head_bytes <= BLOCK_BYTES
    ]
    return StreamShape(num_cores, num_tokens, width, num_heads, num_kv, max(fitting, default=1), weights["q_LDH"].dtype)


def _buffer_bytes(shape: StreamShape) -> int:
    """Return the size of a buffer of columns."""
    return shape.buffer_heads * shape.width * HEAD_WIDTH * jnp.dtype(shape.dtype).itemsize


def project_streamed(  # noqa: PLR0913 (arrays, by keyword)
    hidden_TD: jax.Array,
    added_TD: jax.Array,
    stacked: StackedWeights,
    rotation: Rotation,
    *,
    shape: StreamShape,
    eps: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add and norm as `add_norm.add_and_norm`, then project as `attention_heads.project_packed_rows`.

    Returns: the sum [T, D], queries [T, heads, h], and rows of the pool [T, X].
    """
    weights, layer = stacked
    cos_Tr, sin_Tr = rotation
    cos_Th, sin_Th = (jnp.concatenate(pair, axis=1) for pair in ((cos_Tr, cos_Tr), (-sin_Tr, sin_Tr)))
    hbm, vmem = (pl.BlockSpec(memory_space=space) for space in (pltpu.HBM, pltpu.VMEM))
    tokens, heads, kv_heads = shape.num_tokens, shape.num_heads * shape.num_cores, shape.num_kv * shape.num_cores
    dtype, scale_LD = hidden_TD.dtype, weights["norm_LD"]
    if not interpret:
        # XLA may otherwise bring the scales of all layers into the core's memory, in every layer.
        scale_LD = pltpu.with_memory_space_constraint(scale_LD, pltpu.HBM)
    return pl.pallas_call(
        partial(_project, shape=shape, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(shape.num_cores,),
            in_specs=[scales_around(scale_LD), *[vmem] * 6, *[hbm] * 3],
            out_specs=[hbm, hbm, hbm],
            scratch_shapes=_scratch(shape, dtype),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(hidden_TD.shape, dtype),
            jax.ShapeDtypeStruct((tokens, heads, HEAD_WIDTH), dtype),
            jax.ShapeDtypeStruct((tokens, 2 * kv_heads * HEAD_WIDTH), dtype),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=(pltpu.PARALLEL,), vmem_limit_bytes=VMEM_BYTES),
        name="streamed_heads",
        interpret=interpret,
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        scale_LD,
        hidden_TD,
        added_TD,
        *(weights[name] for name in ("q_norm_Lh", "k_norm_Lh")),
        cos_Th,
        sin_Th,
        *(weights[name] for name in MATRICES),
    )


def _scratch(shape: StreamShape, dtype: Any) -> list[Any]:
    """Return the scratch: two buffers of columns, the sum and its norm, queries in 32 bits and rounded, rows of the
    pool, and the semaphores of arrivals and departures."""
    tokens, lanes = shape.num_tokens, 2 * shape.num_kv * HEAD_WIDTH
    return [
        pltpu.VMEM((2, shape.width, shape.buffer_heads * HEAD_WIDTH), shape.dtype),
        *[pltpu.VMEM((tokens, shape.width), dtype)] * 2,
        pltpu.VMEM((tokens * shape.num_heads, HEAD_WIDTH), jnp.float32),
        pltpu.VMEM((tokens, shape.num_heads, HEAD_WIDTH), dtype),
        pltpu.VMEM((tokens, lanes), dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((3,)),
    ]


@dataclass(frozen=True)
class _Stream:
    """Columns of a layer on their way into two buffers [2, D, W], and the tokens to multiply."""

    layer: jax.Array
    normed: Any
    buffers: Any
    arrivals: Any

    def copy(self, matrix: Any, first_head: Any, num_heads: int, half: Any) -> Any:
        columns = pl.ds(pl.multiple_of(first_head * HEAD_WIDTH, HEAD_WIDTH), num_heads * HEAD_WIDTH)
        target = self.buffers.at[half, :, pl.ds(0, num_heads * HEAD_WIDTH)]
        return pltpu.make_async_copy(matrix.at[self.layer, :, columns], target, self.arrivals.at[half])

    def heads_in(self, half: Any, num_heads: int) -> list[jax.Array]:
        """Return the heads [T, h] of the columns in a buffer, rounded as by `layers.project`."""
        weights_DW = self.buffers[half, :, pl.ds(0, num_heads * HEAD_WIDTH)]
        projected_TW = jnp.dot(self.normed[...], weights_DW, preferred_element_type=jnp.float32)
        projected_TW = _rounded(projected_TW, self.normed.dtype)
        return [projected_TW[:, i * HEAD_WIDTH : (i + 1) * HEAD_WIDTH] for i in range(num_heads)]


def _project(*refs: Any, shape: StreamShape, eps: float) -> None:
    """Compute blocks of queries, then keys, then values; results are copied to HBM at the end."""
    layer_1, scales, hidden, added, q_norms, k_norms, cos, sin, queries, keys, values, *rest = refs
    out_total, out_queries, out_rows, buffers, total, normed, wide_queries, own_queries, own_rows, *rest = rest
    (arrivals, left), core = rest, pl.program_id(0)
    stream = _Stream(layer_1[0], normed, buffers, arrivals)
    q_norm_1h, k_norm_1h = (row_of(norms[...], layer_1[0]) for norms in (q_norms, k_norms))
    turned = partial(_turned, angles=(cos[...], sin[...]), eps=eps, dtype=normed.dtype)
    first_head, first_kv, num_blocks = core * shape.num_heads, core * shape.num_kv, shape.num_blocks
    block_of = partial(stream.copy, queries, num_heads=shape.block_heads)
    keys_in = stream.copy(keys, first_kv, shape.num_kv, num_blocks % 2)
    values_in = stream.copy(values, first_kv, shape.num_kv, (num_blocks + 1) % 2)

    def multiply_queries(block: jax.Array, carry: None) -> None:
        half = jax.lax.rem(block, 2)

        following = block_of(first_head + (block + 1) * shape.block_heads, half=1 - half)
        pl.when(block + 1 < num_blocks)(following.start)
        pl.when(block + 1 == num_blocks)(keys_in.start)
        block_of(first_head, half=half).wait()
        for i, head_Th in enumerate(stream.heads_in(half, shape.block_heads)):
            rows = pl.ds(block * shape.block_heads + i, shape.num_tokens, stride=shape.num_heads)
            wide_queries[rows, :] = turned(head_Th, q_norm_1h)

    block_of(first_head, half=0).start()
    scale = row_of(scales[...], jax.lax.rem(layer_1[0], scales.shape[0]))
    total[...], normed[...] = sum_and_norm(hidden[...], added[...], scale, eps)
    total_out = pltpu.make_async_copy(total, out_total, left.at[2])
    pl.when(core == 0)(total_out.start)
    jax.lax.fori_loop(0, num_blocks, multiply_queries, None)
    values_in.start()
    own_queries[...] = wide_queries[...].astype(own_queries.dtype).reshape(own_queries.shape)
    lanes = 2 * shape.num_kv * HEAD_WIDTH
    queries_out = pltpu.make_async_copy(own_queries, out_queries.at[:, pl.ds(first_head, shape.num_heads)], left.at[0])
    rows_out = pltpu.make_async_copy(
        own_rows, out_rows.at[:, pl.ds(pl.multiple_of(core * lanes, lanes), lanes)], left.at[1]
    )
    queries_out.start()
    keys_in.wait()
    _put(own_rows, 0, [turned(head_Th, k_norm_1h) for head_Th in stream.heads_in(num_blocks % 2, shape.num_kv)])
    values_in.wait()
    _put(own_rows, 1, stream.heads_in((num_blocks + 1) % 2, shape.num_kv))
    rows_out.start()
    queries_out.wait()
    rows_out.wait()
    pl.when(core == 0)(total_out.wait)


def _put(rows: Any, first: int, heads: list[jax.Array]) -> None:
    """Store keys (`first` 0) or values (1) of all heads in packed rows."""
    for i, head_Th in enumerate(heads):
        place = (2 * i + first) * HEAD_WIDTH
        rows[:, place : place + HEAD_WIDTH] = head_Th.astype(rows.dtype)


def _turned(
    head_Th: jax.Array, scale_1h: jax.Array, *, angles: tuple[jax.Array, jax.Array], eps: float, dtype: Any
) -> jax.Array:
    """Return a head normed and rotated, in float32 with the roundings of the reference."""
    cos_Th, sin_Th = angles
    mean_T1 = jnp.mean(head_Th * head_Th, axis=-1, keepdims=True)
    normed_Th = _rounded(_rounded(head_Th * jax.lax.rsqrt(mean_T1 + eps), dtype) * scale_1h, dtype)
    return normed_Th * cos_Th + pltpu.roll(normed_Th, HEAD_WIDTH // 2, 1) * sin_Th


def _rounded(wide: jax.Array, dtype: Any) -> jax.Array:
    return wide.astype(dtype).astype(jnp.float32)
