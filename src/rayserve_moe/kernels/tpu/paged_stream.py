"""Copies of the pool's pages into the core's memory: blocks of keys arrive while an earlier block is multiplied.

The blocks of a core's visits form one sequence: the first blocks of a visit are requested during the last blocks of
earlier visits. Copies into all buffers but one are in flight, so that HBM is never idle.
"""

# B query blocks   Q queries per block   P page-table width   X lanes of a row   S key positions of a block
# N buffers

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.tpu.byte_pairs import narrowed, widened
from rayserve_moe.kernels.tpu.paged_sizes import CLEARED_ROWS


class Scalars(NamedTuple):
    """Scalar memory: page ids [B * P] from a first page on [] (None: the pool's first), the fields of
    `paged_attention.Visits`, and positions of queries.

    If visits are groups of single tokens: also the row of their page ids, their first token, and their number, [W].
    """

    first_page: Any
    pages: Any
    first: Any
    end: Any
    filled: Any
    positions: Any
    tables: Any = None
    starts: Any = None
    counts: Any = None


class Reach(NamedTuple):
    """The keys that a `visit` sees: from `first` to ahead of `end`, on `num_pages` pages.

    The first key of the first page stands at `begin`, and that page's id at `table`.
    """

    first: jax.Array
    end: jax.Array
    begin: jax.Array
    table: jax.Array
    num_pages: jax.Array
    visit: jax.Array


@dataclass(frozen=True)
class PageStream:
    """Pool in HBM, and buffers [N, S, X] in the core's memory that hold a block each, with a semaphore each.

    `num_tiles` visits belong to a sequence with `table_width` pages; a block has `num_pages` of `page_size` keys.
    """

    scalars: Scalars
    pool: Any
    blocks: Any
    arrivals: Any
    num_tiles: int
    table_width: int
    num_pages: int
    page_size: int

    @property
    def num_keys(self) -> int:
        return self.num_pages * self.page_size

    def reach_of(self, visit: jax.Array) -> Reach:
        """Return the keys that a visit sees of its sequence."""
        first, end = self.scalars.first[visit], self.scalars.end[visit]
        first_page = jax.lax.div(first, self.page_size)
        tables = self.scalars.tables
        block = jax.lax.div(visit, self.num_tiles) if tables is None else tables[visit]
        table = block * self.table_width + first_page
        return Reach(first, end, first_page * self.page_size, table, pl.cdiv(end, self.page_size) - first_page, visit)

    def num_blocks(self, reach: Reach) -> jax.Array:
        """Return the number of blocks of keys of a visit; 0 for padding."""
        return pl.cdiv(reach.num_pages, self.num_pages)

    def first_key(self, reach: Reach, block: jax.Array) -> jax.Array:
        """Return the position of the first key of a block."""
        return reach.begin + block * self.num_keys

    def start(self, reach: Reach, block: jax.Array, buffer: jax.Array) -> None:
        """Request the pages of a block."""
        first = block * self.num_pages

        def copy(i: jax.Array, carry: None) -> None:
            keys = pl.ds(pl.multiple_of(i * self.page_size, self.page_size), self.page_size)
            source, target = self.pool.at[self._page_of(reach, first + i)], self.blocks.at[buffer, keys]
            pltpu.make_async_copy(source, target, self.arrivals.at[buffer]).start()

        jax.lax.fori_loop(0, jnp.minimum(reach.num_pages - first, self.num_pages), copy, None)

    def place_of(self, reach: Reach, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the page of a key in the pool, and its row there."""
        place = key - reach.begin
        return self._page_of(reach, jax.lax.div(place, self.page_size)), jax.lax.rem(place, self.page_size)

    def _page_of(self, reach: Reach, page: jax.Array) -> jax.Array:
        of_table, first_page = self.scalars.pages[reach.table + page], self.scalars.first_page
        return of_table if first_page is None else first_page[...] + of_table

    def start_next(self, visit: jax.Array, end: jax.Array, buffer: jax.Array) -> None:
        """Request the first block of the first visit from `visit` on, ahead of `end`, that has blocks."""
        filled = self.scalars.filled[visit]

        @pl.when(filled < end)
        def _() -> None:
            self.start(self.reach_of(filled), jnp.int32(0), buffer)

    def wait(self, reach: Reach, block: jax.Array, buffer: jax.Array) -> None:
        """Wait for all pages of a block at once: a semaphore counts bytes."""
        num_pages = jnp.minimum(reach.num_pages - block * self.num_pages, self.num_pages)
        arrived = self.blocks.at[buffer, pl.ds(0, pl.multiple_of(num_pages * self.page_size, self.page_size))]
        pltpu.make_async_copy(arrived, arrived, self.arrivals.at[buffer]).wait()

    def clear(self, reach: Reach, block: jax.Array, buffer: jax.Array) -> None:
        """Zero the rows of a block that the visit does not see: a weight of zero does not silence NaN.

        Only the first and the last page of a visit hold such rows, and a block keeps none of another visit's.
        """
        begin = self.first_key(reach, block)
        read = jnp.minimum((reach.num_pages - block * self.num_pages) * self.page_size, self.num_keys)

        @pl.when(begin < reach.first)
        def _() -> None:
            self._clear_rows(buffer, jnp.zeros_like(begin), reach.first - begin)

        @pl.when(reach.end < begin + read)
        def _() -> None:
            self._clear_rows(buffer, reach.end - begin, read)

    def _clear_rows(self, buffer: jax.Array, first: jax.Array, end: jax.Array) -> None:
        """Zero rows from `first` to ahead of `end`; either is a multiple of `CLEARED_ROWS`."""

        def clear_rows(i: jax.Array, carry: None) -> None:
            at = pl.multiple_of(i * CLEARED_ROWS, CLEARED_ROWS)
            keys = pl.ds(at, CLEARED_ROWS)
            place = at + jax.lax.broadcasted_iota(jnp.int32, (CLEARED_ROWS, 1), 0)
            held = widened(self.blocks[buffer, keys])
            is_out = (place >= first) & (place < end)
            self.blocks[buffer, keys] = narrowed(jnp.where(is_out, 0.0, held), self.blocks.dtype)

        jax.lax.fori_loop(jax.lax.div(first, CLEARED_ROWS), pl.cdiv(end, CLEARED_ROWS), clear_rows, None)


class Progress(NamedTuple):
    """Position of a `BlockQueue`, in scalar memory: int32 [1] each."""

    num_done: Any
    """Number of multiplied blocks."""
    visit: Any
    """Visit of the next block to request."""
    block: Any
    """Next block to request, within its visit."""


@dataclass(frozen=True)
class BlockQueue:
    """Sequence of the blocks of all visits ahead of `end`. It keeps copies into all buffers but one in flight."""

    stream: PageStream
    progress: Progress
    end: jax.Array

    @property
    def num_buffers(self) -> int:
        """Return the number of buffers."""
        return self.stream.blocks.shape[0]

    @property
    def buffer(self) -> jax.Array:
        """Return the buffer with the next block to multiply."""
        return jax.lax.rem(self.progress.num_done[0], self.num_buffers)

    def begin(self, visit: jax.Array) -> None:
        """Start at the first block of the first nonempty visit from `visit` on."""
        self.progress.num_done[0] = self.progress.block[0] = 0
        self.progress.visit[0] = self.stream.scalars.filled[visit]

    def fill(self, num_buffers: jax.Array) -> None:
        """Zero the first `num_buffers` buffers (0 or all) and request a block into each, except into the last one."""
        blocks = self.stream.blocks

        def fill_one(buffer: jax.Array, carry: None) -> None:
            blocks[buffer] = jnp.zeros(blocks.shape[1:], blocks.dtype)
            pl.when(buffer + 1 < self.num_buffers)(partial(self._request, buffer))

        jax.lax.fori_loop(0, num_buffers, fill_one, None)

    def advance(self) -> None:
        """Request a block into the buffer of the last multiplied block."""
        behind = self.progress.num_done[0] + self.num_buffers - 1
        self._request(jax.lax.rem(behind, self.num_buffers))

    def _request(self, buffer: jax.Array) -> None:
        """Request the next block, or nothing after the last one."""
        visit, block = self.progress.visit[0], self.progress.block[0]

        @pl.when(visit < self.end)
        def _() -> None:
            reach = self.stream.reach_of(visit)
            self.stream.start(reach, block, buffer)
            is_last = block + 1 == self.stream.num_blocks(reach)
            self.progress.visit[0] = jnp.where(is_last, self.stream.scalars.filled[visit + 1], visit)
            self.progress.block[0] = jnp.where(is_last, 0, block + 1)
