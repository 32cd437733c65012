"""Queries of a group of single tokens as rows of a tile, and what they attended back to where each token has it."""

# U single tokens   Q most of a group   C sets   R query heads of a set, padded   T rows of a tile: Q * R, padded
# K lanes of keys   V lanes of values

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.paged_sizes import ALIGNED_ROWS


@dataclass(frozen=True)
class GroupTokens:
    """Queries [Q, C, R, K] of a group and of tokens behind it, the tile [1, C, T, K] that they become; what all tokens
    attend [U, C, R, V] in HBM, places [Q, C, R, V] that it is written from, how many are in use, and the end of their
    copies."""

    given: Any
    tile: Any
    out: Any
    staged: Any
    num_used: Any
    done: Any

    def begin(self) -> None:
        """Nothing is in use, and rows that no query has are zero."""
        self.num_used[0] = 0
        self.tile[...] = jnp.zeros_like(self.tile)

    def lay_out(self) -> None:
        """Put the rows of all queries under each other."""
        num_queries, num_sets, num_rows, _ = self.given.shape
        at_once = 1 if num_rows % ALIGNED_ROWS == 0 else 2
        for i, first in product(range(num_sets), range(0, num_queries, at_once)):
            queries = range(first, min(first + at_once, num_queries))
            given_RK = jnp.concatenate([self.given[query, i].astype(jnp.float32) for query in queries], axis=0)
            rows = pl.ds(first * num_rows, len(queries) * num_rows)
            self.tile[0, i, rows] = given_RK.astype(self.tile.dtype)

    def write(self, sums: Any, start: jax.Array, count: jax.Array) -> None:
        """Write the weighted means of values of `count` tokens from `start` on."""
        self.wait()
        _, num_sets, num_rows, lanes = self.staged.shape

        def write_one(query: jax.Array, carry: None) -> None:
            rows = pl.ds(pl.multiple_of(query * num_rows, num_rows), num_rows)
            for i in range(num_sets):
                weight_R1 = jnp.maximum(sums.weight[i, rows][:, :1], 1.0)
                attended_RV = sums.total[i, rows] / jnp.broadcast_to(weight_R1, (num_rows, lanes))
                self.staged[query, i] = attended_RV.astype(self.staged.dtype)
            pltpu.make_async_copy(self.staged.at[query], self.out.at[start + query], self.done).start()

        jax.lax.fori_loop(0, count, write_one, None)
        self.num_used[0] = count

    def wait(self) -> None:
        """Wait until what was staged is where tokens have it."""

        def wait_for_one(_: jax.Array, carry: None) -> None:
            pltpu.make_async_copy(self.staged.at[0], self.staged.at[0], self.done).wait()

        jax.lax.fori_loop(0, self.num_used[0], wait_for_one, None)
        self.num_used[0] = 0
