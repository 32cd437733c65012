"""Expert products of GPUs: two Triton kernels that read the matrices of each expert in place.

Rows are taken in the order of their slots, in tiles of a single slot each. A tile multiplies with the flat weights of
all layers at its slot, so that no layer's weights are copied. Weights of 8 bits are converted in the kernel.
"""

# T tokens   D model width   F expert width   K experts per token   P assignments = T * K   S local slots   I tiles
# X layers * S   Z blocks of rows with scales of their own

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rayserve_moe.kernels.gpu.blocks import MIN_SIZE, at_rows, is_unreachable, largest_divisor, product
from rayserve_moe.kernels.gpu.tile_order import order_tiles
from rayserve_moe.kernels.narrow_weights import NARROW, SCALE_BLOCK
from rayserve_moe.kernels.reference.activations import Activation, activate
from rayserve_moe.kernels.reference.expert_products import LayerExperts
from rayserve_moe.kernels.slot_order import take


class Blocks(NamedTuple):
    """Sizes of a kernel's blocks, and how it runs."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class _Matrix(NamedTuple):
    """References to a product's matrices of all slots, and to their scales and biases, if any."""

    matrix: Any
    scales: Any
    bias: Any


def unsupported_reason(hidden_TD: jax.Array, _: jax.Array, experts: LayerExperts, **__: Any) -> str:
    """Return why `multiply_grouped` does not take a call; empty if it does."""
    weights, dtype = experts.weights, hidden_TD.dtype
    (width, inner), held = weights.up_XDF.shape[1:], weights.up_XDF.dtype
    if experts.adapters is not None:
        return "rows have adapters"
    if width % MIN_SIZE or inner % MIN_SIZE:
        return f"experts of {width} x {inner} are no multiples of {MIN_SIZE}"
    if held != dtype and held not in NARROW:
        return f"rows of {dtype} and matrices of {held}"
    if is_unreachable(weights.up_XDF):
        return f"{weights.up_XDF.size / 1e9:.2f} GB of {held}, which offsets of 32 bits do not reach"
    return ""


def multiply_grouped(
    hidden_TD: jax.Array,
    slots_TK: jax.Array,
    experts: LayerExperts,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply as `multiply_in_blocks` does: [T, K, D] in the tokens' dtype. `interpret` runs it without a GPU."""
    weights, config = experts.weights, experts.config
    num_tokens, top_k = slots_TK.shape
    _, width, inner = weights.up_XDF.shape
    blocks = blocks or blocks_for(tile_rows(config.mean_rows))
    num_rows, flat_TD = slots_TK.size, hidden_TD.reshape(num_tokens, width)
    order = order_tiles(slots_TK, config.num_slots, blocks.rows, experts.first_slot, interpret=interpret)
    tiles = order.tiles
    before = [(weights.up_XDF, weights.up_scale_XZF, weights.up_bias_XF)]
    if weights.gate_XDF is not None:
        before.insert(0, (weights.gate_XDF, weights.gate_scale_XZF, weights.gate_bias_XF))
    down = (weights.down_XFD, weights.down_scale_XZD, weights.down_bias_XD)

    def call(kernel: Any, columns: int, depth: int, arrays: list[Any], name: str) -> jax.Array:
        sizes = fitting(blocks, columns, depth)
        given = [array for array in arrays if array is not None]
        return pl.pallas_call(
            partial(_with_absent, kernel, [array is not None for array in arrays], blocks=sizes),
            out_shape=jax.ShapeDtypeStruct((num_rows, columns), hidden_TD.dtype),
            grid=(len(tiles.slot_I), columns // sizes.columns),
            compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
            interpret=interpret,
            name=name,
        )(*given)

    gate_up = partial(_gate_up, activation=config.activation)
    arrays = [*tiles, order.token_P.astype(jnp.int32), flat_TD, *(array for each in before for array in each)]
    inner_PF = call(gate_up, inner, width, arrays, "gpu_experts_gate_up")
    rows_PD = call(_down, width, inner, [*tiles, inner_PF, *down], "gpu_experts_down")
    return take(rows_PD, order.row_P).reshape(num_tokens, top_k, *hidden_TD.shape[1:])


def tile_rows(mean: float) -> int:
    """Return the rows of a tile for the mean load of a slot."""
    return 16 if mean <= 8 else 32 if mean <= 24 else 64 if mean <= 96 else 128


def blocks_for(rows: int) -> Blocks:
    """Return the sizes for tiles of `rows`: the fastest tried on an H200 at D 2048 and F 768."""
    if rows <= 32:
        return Blocks(rows, 64, 128, 4, 4)
    return Blocks(rows, 128, 64, 8 if rows > 64 else 4, 3)


def fitting(blocks: Blocks, columns: int, depth: int) -> Blocks:
    """Return the sizes, made smaller until they divide the columns and the inner width of a product."""
    deep = largest_divisor(depth, min(blocks.depth, SCALE_BLOCK))
    return blocks._replace(columns=largest_divisor(columns, blocks.columns), depth=deep)


def _with_absent(kernel: Any, is_there: list[bool], *refs: Any, **named: Any) -> None:
    """Run a kernel with None for the absent ones of its inputs."""
    given = iter(refs)
    kernel(*(next(given) if there else None for there in is_there), *given, **named)


def _gate_up(*refs: Any, blocks: Blocks, activation: Activation) -> None:
    """Multiply the rows of a tile with gate and up, or up alone, and apply the activation."""
    slots, firsts, ends, token_P, hidden, *matrices, inner = refs
    before = [_Matrix(*matrices[i : i + 3]) for i in range(0, len(matrices), 3)]
    tile, column = pl.program_id(0), pl.program_id(1)
    first, end = firsts[tile], ends[tile]

    @pl.when(first < end)
    def _() -> None:
        rows = first + jnp.arange(blocks.rows)
        is_row = rows < end
        tokens = plgpu.load(token_P.at[rows], mask=is_row, other=0)

        def rows_at(at: jax.Array) -> jax.Array:
            place = at_rows(hidden, tokens, first=at, size=blocks.depth)
            return plgpu.load(place, mask=is_row[:, None], other=0)

        made = _products(rows_at, before, slots[tile], column, depth=hidden.shape[1], blocks=blocks)
        out = activate(made[0] if len(made) == 2 else None, made[-1], activation).astype(inner.dtype)
        columns = pl.ds(column * blocks.columns, blocks.columns)
        plgpu.store(inner.at[pl.ds(first, blocks.rows), columns], out, mask=is_row[:, None])


def _down(*refs: Any, blocks: Blocks) -> None:
    """Multiply the rows of a tile with down."""
    slots, firsts, ends, inner, *matrix, out = refs
    tile, column = pl.program_id(0), pl.program_id(1)
    first, end = firsts[tile], ends[tile]

    @pl.when(first < end)
    def _() -> None:
        rows = first + jnp.arange(blocks.rows)
        is_row = rows < end

        def rows_at(at: jax.Array) -> jax.Array:
            return plgpu.load(at_rows(inner, rows, first=at, size=blocks.depth), mask=is_row[:, None], other=0)

        (made,) = _products(rows_at, [_Matrix(*matrix)], slots[tile], column, depth=inner.shape[1], blocks=blocks)
        columns = pl.ds(column * blocks.columns, blocks.columns)
        plgpu.store(out.at[pl.ds(first, blocks.rows), columns], made.astype(out.dtype), mask=is_row[:, None])


def _products(
    rows_at: Any, matrices: list[_Matrix], slot: jax.Array, column: jax.Array, *, depth: int, blocks: Blocks
) -> list[jax.Array]:
    """Return the products of a tile with a block of columns of each matrix, scaled and with biases, float32."""
    columns = pl.ds(column * blocks.columns, blocks.columns)

    def multiply(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = i * blocks.depth
        rows = rows_at(at)
        blocks_of = (_block(each, slot, (at, blocks.depth), columns, rows.dtype) for each in matrices)
        return tuple(total + product(rows, block) for total, block in zip(sums, blocks_of, strict=True))

    zeros = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, depth // blocks.depth, multiply, (zeros,) * len(matrices))
    return [_finished(total, each, slot, columns) for total, each in zip(sums, matrices, strict=True)]


def _block(each: _Matrix, slot: jax.Array, rows: tuple[Any, int], columns: Any, dtype: jnp.dtype) -> jax.Array:
    """Return a block of a matrix in the dtype of the rows, with the scales of blocks applied in float32."""
    at, depth = rows
    block = plgpu.load(each.matrix.at[slot, pl.ds(at, depth), columns])
    if each.scales is None or each.scales.shape[1] == 1:
        return block.astype(dtype)
    scale = plgpu.load(each.scales.at[slot, at // SCALE_BLOCK, columns])
    return (block.astype(jnp.float32) * scale[None, :]).astype(dtype)


def _finished(total: jax.Array, each: _Matrix, slot: jax.Array, columns: Any) -> jax.Array:
    """Return a product times the scales of its columns, plus its bias."""
    if each.scales is not None and each.scales.shape[1] == 1:
        first = jnp.zeros((), jnp.int32)  # interpreted, Pallas takes no constant here
        total = total * plgpu.load(each.scales.at[slot, first, columns])[None, :]
    if each.bias is not None:
        total = total + plgpu.load(each.bias.at[slot, columns])[None, :].astype(jnp.float32)
    return total
