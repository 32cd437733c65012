"""The new rows of single tokens on their way into the pool, which the kernel that attends them writes itself.

A row of 16 bits shares registers with others, so it is put into the rows that came with its page and goes back among
them. The page belongs to one sequence, and its tokens of the step are a single visit: no other visit reads or writes
these rows.
"""

# B single tokens   X lanes of a row   R rows of a token block   G rows that are written at once
# W rows around these   N times that rows of a visit are written

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.tpu.add_norm import row_of
from rayserve_moe.kernels.tpu.byte_pairs import as_pairs, is_nan, is_paired, nan_bits, narrowed, widened
from rayserve_moe.kernels.tpu.packed_rows import LANES, RowLayout
from rayserve_moe.kernels.tpu.paged_sizes import CLEARED_ROWS
from rayserve_moe.kernels.tpu.paged_stream import PageStream, Reach

NEW_ROWS = 16
"""Number of single tokens with new rows in the core's memory at once: whole registers of 16-bit numbers."""


@dataclass(frozen=True)
class RowWrites:
    """Rows [R, X] of the visit's token among them, a place [G, X] that they are written from, whether it is in use,
    and the end of its copy."""

    rows_RX: Any
    staged_GX: Any
    is_used: Any
    done: Any

    def begin(self) -> None:
        """Set the number of places in use to 0."""
        self.is_used[0] = 0

    def put(self, stream: PageStream, visit: jax.Array, reach: Reach, block: jax.Array, buffer: jax.Array) -> None:
        """Put the row of a visit at its last key, in the block that has arrived and in the pool."""
        place = reach.end - 1 - stream.first_key(reach, block)
        first = jax.lax.div(place, CLEARED_ROWS) * CLEARED_ROWS
        keys = pl.ds(pl.multiple_of(first, CLEARED_ROWS), CLEARED_ROWS)
        held_GX = widened(stream.blocks[buffer, keys])
        is_new_GX = jax.lax.broadcasted_iota(jnp.int32, held_GX.shape, 0) == place - first
        row_X = row_of(self.rows_RX[...], jax.lax.rem(visit, self.rows_RX.shape[0]))
        written_GX = narrowed(jnp.where(is_new_GX, row_X, held_GX), self.staged_GX.dtype)
        stream.blocks[buffer, keys] = written_GX
        self.wait()
        self.staged_GX[...] = written_GX
        page, row = stream.place_of(reach, reach.end - 1)
        rows = pl.ds(pl.multiple_of(jax.lax.div(row, CLEARED_ROWS) * CLEARED_ROWS, CLEARED_ROWS), CLEARED_ROWS)
        pltpu.make_async_copy(self.staged_GX, stream.pool.at[page, rows], self.done).start()
        self.is_used[0] = 1

    def wait(self) -> None:
        """Wait until staged rows are in the pool."""

        @pl.when(self.is_used[0] > 0)
        def _() -> None:
            pltpu.make_async_copy(self.staged_GX, self.staged_GX, self.done).wait()
            self.is_used[0] = 0


AROUND = CLEARED_ROWS + 8
"""Number of rows that include the rows of a piece, whatever their first row."""


def max_pieces(num_rows: int) -> int:
    """Return the maximum number of pieces of the pool that the rows of a group lie in."""
    return pl.cdiv(num_rows - 1, CLEARED_ROWS) + 1


def spaced_rows(rows_BX: jax.Array) -> jax.Array:
    """Return rows of all single tokens as `GroupWrites` reads them: in float32, whose rows can be addressed.

    Padding at both ends is read with the pieces of the first and of the last token.
    """
    return jnp.pad(rows_BX.astype(jnp.float32), ((CLEARED_ROWS, AROUND + -len(rows_BX) % 8), (0, 0)))


@dataclass(frozen=True)
class GroupWrites:
    """`spaced_rows` [R, X] of all tokens, places [N, G, X] that pieces of a group are written from, how many of them
    are in use, and the end of their copies."""

    rows_RX: Any
    staged_NGX: Any
    num_used: Any
    done: Any

    def begin(self) -> None:
        """Set the number of places in use to 0."""
        self.num_used[0] = 0

    def put(self, stream: PageStream, reach: Reach, block: jax.Array, buffer: jax.Array, *, layout: RowLayout) -> None:
        """Put a visit's new rows, which are its last keys, into a block and into the pool."""
        begin, first_new = stream.first_key(reach, block), self._first_new(stream, reach)
        first, end = jnp.maximum(first_new, begin), jnp.minimum(reach.end, begin + stream.num_keys)

        def put_piece(i: jax.Array, carry: None) -> None:
            key = pl.multiple_of(i * CLEARED_ROWS, CLEARED_ROWS)
            pl.when(key <= first_new)(self.wait)
            keys = pl.ds(pl.multiple_of(key - begin, CLEARED_ROWS), CLEARED_ROWS)
            held_GX = widened(stream.blocks[buffer, keys])
            is_new_GX, written_GX = self._among(held_GX, key, stream, reach)
            self._send(written_GX, key, stream, reach)
            silence = silenced_pairs if is_paired(stream.blocks.dtype) else without_lone_nan
            stream.blocks[buffer, keys] = narrowed(silence(written_GX, is_new_GX, layout), stream.blocks.dtype)

        end_piece = jnp.where(first < end, pl.cdiv(end, CLEARED_ROWS), 0)
        jax.lax.fori_loop(jax.lax.div(first, CLEARED_ROWS), end_piece, put_piece, None)

    def _first_new(self, stream: PageStream, reach: Reach) -> jax.Array:
        return reach.end - stream.scalars.counts[reach.visit]

    def _among(
        self, held_GX: jax.Array, key: jax.Array, stream: PageStream, reach: Reach
    ) -> tuple[jax.Array, jax.Array]:
        """Return True for new rows from `key` on, and the rows with new rows put in."""
        first_new = self._first_new(stream, reach)
        key_GX = key + jax.lax.broadcasted_iota(jnp.int32, held_GX.shape, 0)
        is_new_GX = (key_GX >= first_new) & (key_GX < reach.end)
        new_GX = self._rows_from(stream.scalars.starts[reach.visit] + key - first_new)
        return is_new_GX, jnp.where(is_new_GX, new_GX, held_GX)

    def _send(self, rows_GX: jax.Array, key: jax.Array, stream: PageStream, reach: Reach) -> None:
        """Start to copy rows into the pool, from `key` on."""
        staged_GX = self.staged_NGX.at[self.num_used[0]]
        staged_GX[...] = narrowed(rows_GX, self.staged_NGX.dtype)
        page, row = stream.place_of(reach, key)
        rows = pl.ds(pl.multiple_of(row, CLEARED_ROWS), CLEARED_ROWS)
        pltpu.make_async_copy(staged_GX, stream.pool.at[page, rows], self.done).start()
        self.num_used[0] = self.num_used[0] + 1

    def _rows_from(self, token: jax.Array) -> jax.Array:
        """Return rows of tokens from `token` on, which may be ahead of the first or beyond the last: float32 [G, X]."""
        place = token + CLEARED_ROWS
        begin = pl.multiple_of(jax.lax.div(place, 8) * 8, 8)
        around_WX = self.rows_RX[pl.ds(begin, AROUND), :]
        return pltpu.roll(around_WX, jax.lax.rem(AROUND - (place - begin), AROUND), 0)[:CLEARED_ROWS]

    def wait(self) -> None:
        """Wait until staged rows are in the pool."""

        def wait_for_one(_: jax.Array, carry: None) -> None:
            pltpu.make_async_copy(self.staged_NGX.at[0], self.staged_NGX.at[0], self.done).wait()

        jax.lax.fori_loop(0, self.num_used[0], wait_for_one, None)
        self.num_used[0] = 0


def without_lone_nan(rows_GX: jax.Array, is_new_GX: jax.Array, layout: RowLayout) -> jax.Array:
    """Return rows in which new rows with NaN among their values have zeros as values and NaN as keys instead.

    A weight of zero does not silence NaN, and queries that do not see a row must not depend on it.
    """
    is_value_GX = _are_values(jax.lax.broadcasted_iota(jnp.int32, rows_GX.shape, 1), layout)
    none_G1 = jnp.sum(jnp.where(is_value_GX, rows_GX * 0.0, 0.0), axis=1, keepdims=True)
    is_lone_GX = is_new_GX & (none_G1 != 0)
    return jnp.where(is_lone_GX, jnp.where(is_value_GX, 0.0, jnp.nan), rows_GX)


def silenced_pairs(rows_GX: jax.Array, is_new_GX: jax.Array, layout: RowLayout) -> jax.Array:
    """Compute `without_lone_nan` for rows in pairs of 8 bits, as `byte_pairs.widened` has them."""
    pairs_GX, lane_GX = rows_GX.astype(jnp.int32), jax.lax.broadcasted_iota(jnp.int32, rows_GX.shape, 1)
    first_GX = jax.lax.div(lane_GX, LANES) * LANES + lane_GX
    halves = [pairs_GX & 0xFF, (pairs_GX >> 8) & 0xFF]
    are_values = [_are_values(first_GX, layout), _are_values(first_GX + LANES, layout)]
    nan_GX = sum(
        jnp.where(is_value_GX & is_nan(half_GX), 1.0, 0.0)
        for half_GX, is_value_GX in zip(halves, are_values, strict=True)
    )
    is_lone_GX = is_new_GX & (jnp.sum(nan_GX, axis=1, keepdims=True) > 0)
    instead = (jnp.where(is_value_GX, 0, nan_bits()) for is_value_GX in are_values)
    return jnp.where(is_lone_GX, as_pairs(*instead), rows_GX)


def _are_values(lanes_GX: jax.Array, layout: RowLayout) -> jax.Array:
    """Return True for lanes that hold values."""
    of_set_GX = jax.lax.rem(lanes_GX, layout.set_lanes)
    return (of_set_GX >= layout.values_at) & (of_set_GX < layout.values_at + layout.value_lanes)
