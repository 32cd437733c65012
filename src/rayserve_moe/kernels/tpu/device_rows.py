"""TPU kernels that bring tokens into the rows of devices, and add up the rows that devices return.

A row is a token of bfloat16 as words (`dispatch_rows`): it is contiguous, and the vector unit copies it in one piece.
Tokens, or returned rows, lie in the core's memory; rows to send are gathered in groups, and one group is copied to HBM
while the next is gathered.
"""

# T tokens   D model width   N rows   Q words of a row / LANES   R ranks   C tokens converted at once

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.tpu.dispatch_rows import as_words, halves, rounded
from rayserve_moe.kernels.tpu.dispatch_sizes import CONVERTED_TOKENS, LANES

GROUP_ROWS = 128
"""Rows that are copied to HBM at once."""
UNROLLED = 8
"""Rows that a trip of a loop copies."""
SPARE_BYTES = 4 << 20
"""Memory of a core for values."""


def place_rows(hidden_TD: jax.Array, token_N: jax.Array, num_rows: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Return the rows to send as words [N, Q, LANES]: of the token `token_N` each, up to `num_rows`."""
    (num_tokens, width), count = hidden_TD.shape, len(token_N)
    words, groups = width // (2 * LANES), -(-count // GROUP_ROWS)
    token_N = jnp.pad(token_N, (0, groups * GROUP_ROWS - count))
    smem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.HBM))
    out_shape = jax.ShapeDtypeStruct((groups * GROUP_ROWS * words, LANES), jnp.uint32)
    rows = pl.pallas_call(
        partial(_place, words=words),
        in_specs=[smem, smem, pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=hbm,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((num_tokens * words, LANES), jnp.uint32),
            pltpu.VMEM((2, GROUP_ROWS * words, LANES), jnp.uint32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=4 * hidden_TD.nbytes + 2 * SPARE_BYTES),
        name="place_rows",
        interpret=interpret,
    )(num_rows.reshape(1), token_N, hidden_TD)
    return rows.reshape(-1, words, LANES)


def _place(*refs: Any, words: int) -> None:
    num_1, token_N, hidden_TD, out, tokens, held, sent = refs
    chunk, num_groups = CONVERTED_TOKENS, pl.cdiv(num_1[0], GROUP_ROWS)

    def convert(i: jax.Array, _: None) -> None:
        first = pl.multiple_of(i * chunk, chunk)
        words_CW = as_words(hidden_TD[pl.ds(first, chunk), :].astype(jnp.float32))
        for q in range(words):
            tokens[pl.ds(first * words + q, chunk, stride=words), :] = words_CW[:, q * LANES : (q + 1) * LANES]

    def copy_of(group: jax.Array) -> Any:
        to = out.at[pl.ds(pl.multiple_of(group * GROUP_ROWS * words, words), GROUP_ROWS * words)]
        half = jax.lax.rem(group, 2)
        return pltpu.make_async_copy(held.at[half], to, sent.at[half])

    def place(group: jax.Array, _: None) -> None:
        half = jax.lax.rem(group, 2)

        @pl.when(group >= 2)
        def _() -> None:
            copy_of(group).wait()

        def copy(i: jax.Array, _: None) -> None:
            for k in range(UNROLLED):
                row = i * UNROLLED + k
                at = pl.multiple_of(token_N[group * GROUP_ROWS + row] * words, words)
                held[half, pl.ds(pl.multiple_of(row * words, words), words), :] = tokens[pl.ds(at, words), :]

        jax.lax.fori_loop(0, GROUP_ROWS // UNROLLED, copy, None)
        copy_of(group).start()

    jax.lax.fori_loop(0, hidden_TD.shape[0] // chunk, convert, None)
    jax.lax.fori_loop(0, num_groups, place, None)
    jax.lax.fori_loop(jnp.maximum(num_groups - 2, 0), num_groups, lambda group, _: copy_of(group).wait(), None)


def add_rows(rows_NQV: jax.Array, places_RT: jax.Array, num_rows: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Return the sum of each token's rows, in the order of ranks: bfloat16 [T, D]. A place of N is no row."""
    (count, words, _), (_, num_tokens) = rows_NQV.shape, places_RT.shape
    smem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.HBM))
    width = 2 * words * LANES
    return pl.pallas_call(
        partial(_add, words=words, num_ranks=len(places_RT)),
        in_specs=[smem, smem, hbm],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        out_shape=jax.ShapeDtypeStruct((num_tokens, width), jnp.bfloat16),
        scratch_shapes=[
            pltpu.VMEM(((count + 1) * words, LANES), jnp.uint32),
            pltpu.VMEM((CONVERTED_TOKENS * words, LANES), jnp.uint32),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=rows_NQV.nbytes + 4 * num_tokens * width + SPARE_BYTES),
        name="add_rows",
        interpret=interpret,
    )(num_rows.reshape(1), places_RT, rows_NQV.reshape(-1, LANES))


def _add(*refs: Any, words: int, num_ranks: int) -> None:
    num_1, places_RT, rows, out_TD, home, sums, came = refs
    none, chunk = home.shape[0] - words, CONVERTED_TOKENS
    held = pl.ds(jnp.int32(0), num_1[0] * words)
    copy = pltpu.make_async_copy(rows.at[held], home.at[held], came)
    pl.when(num_1[0] > 0)(copy.start)
    home[pl.ds(none, words), :] = jnp.zeros((words, LANES), jnp.uint32)
    pl.when(num_1[0] > 0)(copy.wait)

    def add(token: jax.Array, place: int) -> None:
        lower, upper = jnp.zeros((words, LANES), jnp.float32), jnp.zeros((words, LANES), jnp.float32)
        for rank in range(num_ranks):
            at = pl.multiple_of(places_RT[rank, token] * words, words)
            found = halves(home[pl.ds(at, words), :])
            lower, upper = lower + found[0], upper + found[1]
        sums[pl.ds(place * words, words), :] = packed(lower, upper)

    def add_chunk(i: jax.Array, _: None) -> None:
        first = pl.multiple_of(i * chunk, chunk)
        for k in range(chunk):
            add(first + k, k)
        parts = [halves(sums[pl.ds(q, chunk, stride=words), :]) for q in range(words)]
        columns = [lower for lower, _ in parts] + [upper for _, upper in parts]
        out_TD[pl.ds(first, chunk), :] = jnp.concatenate(columns, axis=1).astype(jnp.bfloat16)

    jax.lax.fori_loop(0, out_TD.shape[0] // chunk, add_chunk, None)


def packed(lower: jax.Array, upper: jax.Array) -> jax.Array:
    """Return words of the numbers of both halves of rows, float32 each, rounded to bfloat16."""
    lower, upper = (pltpu.bitcast(rounded(half), jnp.uint32) for half in (lower, upper))
    return (lower >> 16) | upper
