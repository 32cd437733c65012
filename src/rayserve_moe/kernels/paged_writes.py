"""The new rows of single tokens on their way into the pool, which the kernel that attends them writes itself.

A row of 16 bits shares registers with others, so it is put into the rows that came with its page and goes back among
them. The page belongs to one sequence, whose only token of the step it is: nothing else reads or writes these rows.
"""

# B single tokens   X lanes of a row   R rows of a token block   G rows that are written at once

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.add_norm import row_of
from rayserve_moe.kernels.paged_stream import CLEARED_ROWS, PageStream, Reach

NEW_ROWS = 16
"""Single tokens whose new rows the core's memory holds at once: whole registers of 16-bit numbers."""


@dataclass(frozen=True)
class RowWrites:
    """Rows [R, X] of the visit's token among them, a place [G, X] that they are written from, whether it is in use,
    and the end of its copy."""

    rows_RX: Any
    staged_GX: Any
    is_used: Any
    done: Any

    def put(self, stream: PageStream, visit: jax.Array, reach: Reach, block: jax.Array, half: jax.Array) -> None:
        """Put the row of a visit at its last key, in the block that has arrived and in the pool."""
        place = reach.end - 1 - stream.first_key(reach, block)
        first = jax.lax.div(place, CLEARED_ROWS) * CLEARED_ROWS
        keys = pl.ds(pl.multiple_of(first, CLEARED_ROWS), CLEARED_ROWS)
        held_GX = stream.blocks[half, keys].astype(jnp.float32)
        is_new_GX = jax.lax.broadcasted_iota(jnp.int32, held_GX.shape, 0) == place - first
        row_X = row_of(self.rows_RX[...], jax.lax.rem(visit, self.rows_RX.shape[0]))
        written_GX = jnp.where(is_new_GX, row_X, held_GX).astype(self.staged_GX.dtype)
        stream.blocks[half, keys] = written_GX
        self.wait()
        self.staged_GX[...] = written_GX
        page, row = stream.place_of(reach, reach.end - 1)
        rows = pl.ds(pl.multiple_of(jax.lax.div(row, CLEARED_ROWS) * CLEARED_ROWS, CLEARED_ROWS), CLEARED_ROWS)
        pltpu.make_async_copy(self.staged_GX, stream.pool.at[page, rows], self.done).start()
        self.is_used[0] = 1

    def wait(self) -> None:
        """Wait until what was staged is in the pool."""

        @pl.when(self.is_used[0] > 0)
        def _() -> None:
            pltpu.make_async_copy(self.staged_GX, self.staged_GX, self.done).wait()
            self.is_used[0] = 0
