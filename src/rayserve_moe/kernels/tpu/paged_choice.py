"""Bit masks in the core's memory of the tokens that a tile's queries see, for dense attention of prompts.

A query of a prompt shares the pages that it reads with the other queries of its tile, so attending all pages under a
mask costs products, not bytes. The mask comes from the positions of `token_index`, which chooses alike for a token of a
prompt and a single token. Scoring keys again here would cost 2 * 64 * 128 operations per query and key, and sums in
another order would choose other tokens. A bit of the mask serves all heads of a query.

By libtpu's schedules, in bundles of a core for a query, with S tokens of context and H heads of a device:

    v5p, H 32   0.53 S, and 308 to mark 2,048 tokens; copying the chosen rows (`chosen_attention`) takes 30k
    v6e, H 16   0.12 S, and 280 to mark 2,048 tokens; copying the chosen rows takes 26k

`chosen_attention.attend_prompts` compares products with copies by the figures of the chip: the mask costs less up to
60k tokens on v5p with 32 heads, and up to 478k on v6e with 16. Tiles that see all tokens skip the marks.
"""

# B query blocks   Q queries per block   C sets of heads   q queries of a tile   K chosen tokens or blocks
# W words of a query   L lanes, 128   H halves of words   M rows that are scored at once   S keys of a block

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from rayserve_moe.kernels.reference.attention import BlockPlaces
from rayserve_moe.kernels.tpu.packed_rows import LANES

HALF_BITS, WORD_BITS = 16, 32
"""Rows of positions in half a word, and in a word: a bit is a row of `LANES` positions."""
ALIGNED_WORDS, ALIGNED_HEADS = 8, 8
"""Divisors of the padded number of words of a query, and of its heads: rows of whole registers."""
MARKED = 512
"""Maximum number of chosen tokens that are marked at once."""
NO_KEY = int(np.iinfo(np.int32).max)
"""Position of a key that a query does not see."""


def words_for(num_positions: int) -> int:
    """Return W for a page table of `num_positions`."""
    unit = WORD_BITS * LANES * ALIGNED_WORDS
    return -(-num_positions // unit) * ALIGNED_WORDS


def sees_all(places: BlockPlaces, block_size: int = 0) -> jax.Array:
    """Return True for queries that see all tokens up to their own, bool [B, Q]; False for padding."""
    assert places.chosen_BQK is not None, "tokens are chosen"
    num_chosen = jnp.sum(places.chosen_BQK >= 0, axis=-1)
    if block_size:
        num_chosen = jnp.min(num_chosen, axis=-1)
    return num_chosen == places.positions_BQ // max(1, block_size) + 1


@dataclass(frozen=True)
class TileChoice:
    """References of a tile's choice."""

    see_all: Any
    """1 for visits with only queries that see all tokens, in scalar memory."""
    chosen: Any
    """Positions, or blocks of `LANES` positions, by set of heads and query [1, C * q, K]; -1 for none."""
    words: Any
    """[C * q, W, L]; bit r of lane l in word w stands for position (32 w + r) * L + l."""
    has_blocks: bool
    """True if blocks are chosen."""

    def mark(self, visit: jax.Array) -> None:
        """Set the words of a tile."""
        sees_all = self.see_all[visit] == 1

        @pl.when(sees_all)
        def _() -> None:
            self.words[...] = jnp.full_like(self.words, -1)

        @pl.when(jnp.logical_not(sees_all))
        def _() -> None:
            jax.lax.fori_loop(0, self.words.shape[0], self._mark_query, None)

    def _mark_query(self, query: jax.Array, carry: None) -> None:
        """Set the words of a query of a set: products of powers of two with lanes add up the bits of a half exactly."""
        num_words, num_chosen = self.words.shape[1], self.chosen.shape[2]
        halves_HL = jnp.zeros((2 * num_words, LANES), jnp.float32)
        for first in range(0, num_chosen, MARKED):
            count = min(MARKED, num_chosen - first)
            position_K = self.chosen[0, pl.ds(query, 1), pl.ds(first, count)]
            row_K = position_K
            if not self.has_blocks:
                row_K = jax.lax.shift_right_arithmetic(position_K, LANES.bit_length() - 1)
            is_high_K = (row_K & HALF_BITS) != 0
            word_K = jax.lax.shift_right_arithmetic(row_K, WORD_BITS.bit_length() - 1)
            half_K = jnp.where(position_K < 0, -1, word_K + jnp.where(is_high_K, num_words, 0))
            exponent_K = jax.lax.shift_left((row_K & (HALF_BITS - 1)) + 127, 23)
            power_K = jax.lax.bitcast_convert_type(exponent_K, jnp.float32)
            number_HK = jax.lax.broadcasted_iota(jnp.int32, (2 * num_words, count), 0)
            lane_LK = jax.lax.broadcasted_iota(jnp.int32, (LANES, count), 0)
            powers_HK = jnp.where(number_HK == half_K, power_K, 0.0).astype(jnp.bfloat16)
            is_chosen_LK = self.has_blocks | (lane_LK == (position_K & (LANES - 1)))
            lanes_LK = jnp.where(is_chosen_LK, 1.0, 0.0).astype(jnp.bfloat16)
            halves_HL += jax.lax.dot_general(
                powers_HK, lanes_LK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        whole_HL = halves_HL.astype(jnp.int32)
        self.words[query] = whole_HL[:num_words] | jax.lax.shift_left(whole_HL[num_words:], HALF_BITS)

    def keys_of_rows(self, first_query: jax.Array, first_key: jax.Array, *, shape: tuple[int, int, int]) -> jax.Array:
        """Return the positions of a block's keys for each row, `NO_KEY` for keys not chosen: [M, S].

        `shape` are the queries, the rows of each, and the keys.
        """
        num_queries, query_rows, num_keys = shape
        first_row, columns = jax.lax.div(first_key, LANES), []
        for piece in range(num_keys // LANES):
            of_queries = (self._keys(first_query + query, first_row + piece) for query in range(num_queries))
            rows = [jnp.broadcast_to(keys_L, (query_rows, LANES)) for keys_L in of_queries]
            columns.append(jnp.concatenate(rows))
        return jnp.concatenate(columns, axis=1)

    def _keys(self, query: jax.Array, row: jax.Array) -> jax.Array:
        """Return the positions of a row of keys, [1, L]."""
        word_L = self.words[query, pl.ds(jax.lax.div(row, WORD_BITS), 1)]
        bit_L = jax.lax.shift_right_logical(word_L, jnp.broadcast_to(jax.lax.rem(row, WORD_BITS), word_L.shape)) & 1
        position_L = row * LANES + jax.lax.broadcasted_iota(jnp.int32, word_L.shape, 1)
        return jnp.where(bit_L == 1, position_L, NO_KEY)
