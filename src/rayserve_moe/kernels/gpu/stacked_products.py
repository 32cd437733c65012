"""Products of few tokens with a layer of stacked matrices, read in place: XLA would copy the layer's matrices first."""

# T tokens   D inner width   N columns   L layers

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rayserve_moe.kernels.gpu.blocks import MIN_SIZE, at_rows, cdiv, largest_divisor, power_of_two, product

MAX_TOKENS = 256
"""Maximum number of tokens: for more, a copy of a layer is small beside its product."""
PROGRAMS = 264
"""Programs that fill a GPU: two for each of 132 multiprocessors."""
COLUMNS, MAX_ROWS, MAX_SHARES = 64, 64, 16
DEPTHS = 32, 128
"""Minimum and maximum inner width of a block, a power of two."""


def unsupported_reason(x_TD: jax.Array, matrices: list[jax.Array], *_: Any, **__: Any) -> str:
    """Return why `multiply_stacked` does not take tokens and matrices of a layer, [..., D, N]; empty if it does."""
    (num_tokens, depth), widths = x_TD.shape, [matrix.shape[-1] for matrix in matrices]
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens, not {MAX_TOKENS} or fewer"
    if depth % min(DEPTHS) or any(width % COLUMNS for width in widths):
        sizes = " + ".join(map(str, widths))
        return f"a matrix of {depth} x {sizes} is not whole blocks of {min(DEPTHS)} x {COLUMNS}"
    if any(matrix.dtype not in (x_TD.dtype, jnp.float32) for matrix in matrices):
        return "tokens and matrices differ in dtype"
    return ""


def multiply_stacked(
    x_TD: jax.Array, matrices_LDN: list[jax.Array], layer: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Return the products of tokens with a layer of each stack beside each other, float32 [T, sum of N].

    Tokens are converted to the dtype of the matrices. `interpret` runs it without a GPU.
    """
    (num_tokens, depth), widths = x_TD.shape, [matrix.shape[2] for matrix in matrices_LDN]
    rows = min(MAX_ROWS, max(MIN_SIZE, power_of_two(num_tokens)))
    num_rows, num_columns = cdiv(num_tokens, rows), sum(widths) // COLUMNS
    block, shares = largest_divisor(depth, max(DEPTHS)), 1
    while 2 * shares * num_rows * num_columns <= 2 * PROGRAMS and not depth // block % (2 * shares):
        shares *= 2
        if shares == MAX_SHARES:
            break
    starts = [sum(widths[:i]) // COLUMNS for i in range(len(widths) + 1)]
    out = pl.pallas_call(
        partial(_multiply, rows=rows, block=block, shares=shares, starts=starts),
        out_shape=jax.ShapeDtypeStruct((shares, num_tokens, sum(widths)), jnp.float32),
        grid=(num_rows, num_columns, shares),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="gpu_stacked_product",
    )(jnp.reshape(layer, (1,)).astype(jnp.int32), x_TD, *matrices_LDN)
    return jnp.sum(out, axis=0) if shares > 1 else out[0]


def _multiply(layer_1: Any, x: Any, *refs: Any, rows: int, block: int, shares: int, starts: list[int]) -> None:
    """Multiply a block of rows with a block of columns over a share of the inner width, `block` of it at a time."""
    *matrices, out = refs
    row, column, share = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    tokens = row * rows + jnp.arange(rows)
    is_row = (tokens < x.shape[0])[:, None]
    depth, layer = x.shape[1] // shares, layer_1[0]
    for i, matrix in enumerate(matrices):

        @pl.when((column >= starts[i]) & (column < starts[i + 1]))
        def _(matrix: Any = matrix, first: int = starts[i]) -> None:
            columns = pl.ds((column - first) * COLUMNS, COLUMNS)

            def multiply(k: jax.Array, total: jax.Array) -> jax.Array:
                at = share * depth + k * block
                part = plgpu.load(at_rows(x, tokens, first=at, size=block), mask=is_row, other=0)
                return total + product(
                    part.astype(matrix.dtype), plgpu.load(matrix.at[layer, pl.ds(at, block), columns])
                )

            total = jax.lax.fori_loop(0, depth // block, multiply, jnp.zeros((rows, COLUMNS), jnp.float32))
            place = out.at[share, pl.ds(row * rows, rows), pl.ds(column * COLUMNS, COLUMNS)]
            plgpu.store(place, total, mask=is_row)


def multiply_copied(x_TD: jax.Array, matrices_LDN: list[jax.Array], layer: jax.Array) -> jax.Array:
    """Return the products of `multiply_stacked` by XLA, which copies the layer's matrices first."""
    layers = [stack[layer] for stack in matrices_LDN]
    made = [jnp.matmul(x_TD.astype(own.dtype), own, preferred_element_type=jnp.float32) for own in layers]
    return jnp.concatenate(made, axis=1) if len(made) > 1 else made[0]
