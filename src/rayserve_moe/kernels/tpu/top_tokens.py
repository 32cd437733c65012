"""The best tokens of a query by scores in a core's memory, without sorting them.

The k-th largest score is found two bits at a time by counting. Scores above it are chosen, and of equal ones those at
the lowest positions. The matrix unit counts the chosen tokens ahead of each row of 128, and so finds the row, and then
the lane, of the first, second, third chosen token and so on.
"""

# R rows of scores   C rows of a chunk   Y rows of a register   L lanes, 128   K chosen tokens
# G chosen tokens that are located at once   N counters   X lanes and counters

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from rayserve_moe.kernels.reference.token_index import plain_scores
from rayserve_moe.kernels.tpu.packed_rows import LANES

CHUNK_ROWS, REGISTER_ROWS = 128, 8
"""Rows of scores counted per pass: one tile of the matrix unit. Also the rows of a register."""
CHUNK_POSITIONS = CHUNK_ROWS * LANES
"""Positions of a chunk."""
LOCATED = 256
"""Maximum number of chosen tokens that are located at once."""
COUNTERS = 16
"""Rows of a chunk's columns with its counts: whole registers of 16-bit numbers."""
UNSEEN = int(np.iinfo(np.int32).min)
"""Ordered score of no token."""


def ordered(scores: jax.Array) -> jax.Array:
    """Return int32 numbers in the order of float32 scores; zeros of either sign are equal, and NaN is infinite."""
    bits = jax.lax.bitcast_convert_type(plain_scores(scores), jnp.int32)
    return bits ^ (jax.lax.shift_right_arithmetic(bits, 31) & np.int32(np.iinfo(np.int32).max))


def located_at_once(top_k: int) -> int:
    """Return G for a choice of `top_k` tokens."""
    return LOCATED if top_k > LANES else LANES


def kept_lanes(top_k: int) -> int:
    """Return the lanes that the positions of `top_k` tokens take."""
    at_once = located_at_once(top_k)
    return -(-top_k // at_once) * at_once


@dataclass(frozen=True)
class TopTokens:
    """Scratch of a choice: what is known of each row of a query's scores."""

    before_RL: Any
    """Number of chosen tokens ahead of a row, the same in all lanes."""
    end_RL: Any
    """The same with those of the row."""
    columns_XC: Any
    """For each chunk, a column for each row [L + COUNTERS, C]: chosen tokens up to each lane, and its counters."""

    def choose(self, scores_RL: Any, num_chunks: jax.Array, out_K: Any, *, top_k: int) -> None:
        """Write the positions of the `top_k` largest of `ordered` scores, ascending with -1 behind.

        At least `top_k` of them are not `UNSEEN`.
        """
        lowest_YL = _kth_largest(scores_RL, num_chunks, top_k)
        self._mark(scores_RL, num_chunks, lowest_YL, top_k)
        at_once = located_at_once(top_k)

        def locate(part: jax.Array, carry: None) -> None:
            first = pl.multiple_of(part * at_once, at_once)
            out_K[:, pl.ds(first, at_once)] = self._positions(num_chunks, first, at_once, top_k)

        jax.lax.fori_loop(0, kept_lanes(top_k) // at_once, locate, None)

    def _mark(self, scores_RL: Any, num_chunks: jax.Array, lowest_YL: jax.Array, top_k: int) -> None:
        """Count the chosen tokens of all rows: scores above the lowest one, and the first of those equal to it."""
        above_YL = _count(scores_RL, num_chunks, [lambda rows_CL: rows_CL > _tall(lowest_YL, CHUNK_ROWS)])[0]
        num_ties_CL = _tall(top_k - above_YL, CHUNK_ROWS)
        row_CL, lane_CL = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK_ROWS, LANES), axis) for axis in (0, 1))
        up_to_lane, ahead_of_row = (_bits(row_CL <= lane_CL), _bits(lane_CL < row_CL))
        lanes_up_to, rows_ahead = (_bits(lane_CL <= row_CL), _bits(row_CL < lane_CL))
        ones = _bits(lane_CL >= 0)
        counter_NL = jax.lax.broadcasted_iota(jnp.int32, (COUNTERS, LANES), 0)

        def mark(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ties_CL, before_CL, before_NC = carry
            rows = pl.ds(pl.multiple_of(chunk * CHUNK_ROWS, CHUNK_ROWS), CHUNK_ROWS)
            rows_CL = scores_RL[rows]
            is_tie_CL = rows_CL == _tall(lowest_YL, CHUNK_ROWS)
            of_row_CL = _product(_bits(is_tie_CL), ones)
            rank_CL = _product(_bits(is_tie_CL), up_to_lane) + _product(ahead_of_row, of_row_CL) + ties_CL
            is_chosen_CL = (rows_CL > _tall(lowest_YL, CHUNK_ROWS)) | (is_tie_CL & (rank_CL <= num_ties_CL))
            chosen_CL = _bits(is_chosen_CL)
            num_CL = _product(chosen_CL, ones)
            ahead_CL = _product(ahead_of_row, num_CL) + before_CL
            self.before_RL[rows], self.end_RL[rows] = ahead_CL, ahead_CL + num_CL
            within_LC = _product_of_rows(lanes_up_to, chosen_CL)
            num_NC = _product_of_rows(ones[:COUNTERS], chosen_CL)
            ahead_NC = _product(num_NC, rows_ahead) + before_NC
            high_NC = jnp.floor(ahead_NC * (1.0 / LANES))
            counters_NC = jnp.where(counter_NL == 0, high_NC, ahead_NC - high_NC * LANES)
            counters_NC = jnp.where(counter_NL == 2, chunk.astype(jnp.float32), counters_NC)
            counters_NC = jnp.where(counter_NL == 3, lane_CL[:COUNTERS].astype(jnp.float32), counters_NC)
            self.columns_XC[chunk] = jnp.concatenate([within_LC, counters_NC]).astype(jnp.bfloat16)
            all_ties_CL, all_CL = (_product(ones, each) for each in (of_row_CL, num_CL))
            return ties_CL + all_ties_CL, before_CL + all_CL, before_NC + all_CL[:COUNTERS]

        nothing = jnp.zeros((CHUNK_ROWS, LANES), jnp.float32)
        jax.lax.fori_loop(0, num_chunks, mark, (nothing, nothing, nothing[:COUNTERS]))

    def _positions(self, num_chunks: jax.Array, first: jax.Array, count: int, top_k: int) -> jax.Array:
        """Return the positions of the chosen tokens from number `first` on, [1, count]."""
        number_G = (first + jax.lax.broadcasted_iota(jnp.int32, (1, count), 1)).astype(jnp.float32)

        def gather(chunk: jax.Array, found_XG: jax.Array) -> jax.Array:
            rows = pl.ds(pl.multiple_of(chunk * CHUNK_ROWS, CHUNK_ROWS), CHUNK_ROWS)
            before_CG, end_CG = (jnp.tile(each[rows], (1, count // LANES)) for each in (self.before_RL, self.end_RL))
            is_in_row_CG = (before_CG <= number_G) & (number_G < end_CG)
            return found_XG + _product(self.columns_XC[chunk], _bits(is_in_row_CG))

        nothing_XG = jnp.zeros((LANES + COUNTERS, count), jnp.float32)
        found_XG = jax.lax.fori_loop(0, num_chunks, gather, nothing_XG)
        high, low, chunk, row = (found_XG[LANES + i : LANES + i + 1] for i in range(4))
        is_ahead_LG = found_XG[:LANES] <= number_G - (high * LANES + low)
        lane_G = jnp.sum(jnp.where(is_ahead_LG, 1.0, 0.0), axis=0, keepdims=True)
        position_G = ((chunk * CHUNK_ROWS + row) * LANES + lane_G).astype(jnp.int32)
        return jnp.where(number_G < top_k, position_G, -1)


def _kth_largest(scores_RL: Any, num_chunks: jax.Array, top_k: int) -> jax.Array:
    """Return the `top_k`-th largest score, the same everywhere in a register."""

    def narrow(i: jax.Array, lowest_YL: jax.Array) -> jax.Array:
        step = jax.lax.shift_left(jnp.int32(1), 30 - 2 * i)
        tries = [_tall(lowest_YL + j * step, CHUNK_ROWS) for j in (1, 2, 3)]
        counts = _count(scores_RL, num_chunks, [lambda rows_CL, of=of: rows_CL >= of for of in tries])
        return lowest_YL + sum(jnp.where(count_YL >= top_k, step, 0) for count_YL in counts)

    return jax.lax.fori_loop(0, 16, narrow, jnp.full((REGISTER_ROWS, LANES), UNSEEN, jnp.int32))


def _count(scores_RL: Any, num_chunks: jax.Array, conditions: list[Any]) -> list[jax.Array]:
    """Return how many scores meet each of the conditions, the same everywhere in a register of float32."""

    def count(chunk: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows_CL = scores_RL[pl.ds(pl.multiple_of(chunk * CHUNK_ROWS, CHUNK_ROWS), CHUNK_ROWS)]
        hits = (jnp.where(condition(rows_CL), 1.0, 0.0) for condition in conditions)
        return tuple(
            total_YL + jnp.sum(hit_CL.reshape(-1, REGISTER_ROWS, LANES), axis=0)
            for total_YL, hit_CL in zip(totals, hits, strict=True)
        )

    nothing_YL = jnp.zeros((REGISTER_ROWS, LANES), jnp.float32)
    totals = jax.lax.fori_loop(0, num_chunks, count, (nothing_YL,) * len(conditions))
    return [jnp.broadcast_to(jnp.sum(total_YL, keepdims=True), total_YL.shape) for total_YL in totals]


def _tall(same_YL: jax.Array, num_rows: int) -> jax.Array:
    """Return `num_rows` equal rows of a register."""
    return jnp.tile(same_YL, (num_rows // same_YL.shape[0], 1))


def _bits(condition: jax.Array) -> jax.Array:
    return jnp.where(condition, 1.0, 0.0).astype(jnp.bfloat16)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply numbers of at most 8 bits, which bfloat16 holds exactly; sums are in float32."""
    return jnp.dot(left.astype(jnp.bfloat16), right.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _product_of_rows(left: jax.Array, right: jax.Array) -> jax.Array:
    return jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
