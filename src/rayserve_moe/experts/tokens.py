"""Tokens with their choice of experts, as every expert backend takes them, whole or in chunks.

Tokens are exchanged chunk by chunk, so that buffers do not grow with the step. Within a chunk a rank takes at most
`round_rows` rows at once; further rows come in further rounds, as many as the fullest rank needs. So no token is
ever dropped, and buffers hold 1.5 times the even load instead of the worst case, `num_ranks` times as much.
"""

# T tokens   D model width   K experts per token   G chunks

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

SEND_BYTES = 16 << 20
"""Rows that a device sends per chunk, or an eighth more: its products should outlast reading the weights."""

MANY_CHUNKS, LARGE_SEND_BYTES = 8, 24 << 20
"""Number of chunks from which on chunks may be larger: in every chunk each expert's last tile of rows is half empty,
and its weights are read again."""

ROWS_TOGETHER = 8
"""Rows of a tile on a TPU: results of chunks of other sizes are moved into their places slowly."""

MIN_ROUND_ROWS = 256
"""Rows that are always taken at once: at decode a few hot experts are common and buffers are small."""

MIN_FUSED_CHUNK = 256
"""Tokens that a chunk keeps when a step is cut only to overlap: each further chunk reads the weights anew."""


class RoutedTokens(NamedTuple):
    """Hidden states [T, D], logical expert ids [T, K] in router order, their weights [T, K]; False marks padding.

    With the `slot_choice` `CHOSEN_BEFORE` the ids are slots.
    """

    hidden_TD: jax.Array
    ids_TK: jax.Array
    gates_TK: jax.Array
    valid_T: jax.Array
    adapter_T: jax.Array | None = None
    """Place of each token's adapter among the resident ones, -1 for none; None if no token has one."""


def cut_into_chunks(tokens: RoutedTokens, chunk: int) -> RoutedTokens:
    """Return chunks of `chunk` tokens, each array [G, T, ...]; the last chunk is filled with padding."""

    def cut(array_T: jax.Array) -> jax.Array:
        padded_T = jnp.pad(array_T, [(0, -len(array_T) % chunk), *[(0, 0)] * (array_T.ndim - 1)])
        return padded_T.reshape(-1, chunk, *array_T.shape[1:])

    return jax.tree.map(cut, tokens)


def take_part(tokens: RoutedTokens, part: jax.Array, *, num_parts: int) -> RoutedTokens:
    """Return part number `part` of `num_parts` equal parts, filled with padding if the tokens do not divide."""
    if num_parts == 1:
        return tokens
    parts = cut_into_chunks(tokens, -(-len(tokens.valid_T) // num_parts))
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, part, keepdims=False), parts)


def chunk_tokens(num_tokens: int, *, top_k: int, row_bytes: int, overlapped: bool = False) -> int:
    """Return the tokens of this device per chunk; an `overlapped` exchange has several unless they are small.

    `row_bytes` is the size of a token's hidden state. A few tokens more than the chunks may have, such as decoding rows
    beside whole blocks of prompts, make no chunk of their own.
    """

    def chunks_of(num_bytes: int) -> int:
        most = max(1, num_bytes // (top_k * row_bytes))
        return -(-(num_tokens - most // 8) // most)

    num_chunks = max(1, min(chunks_of(SEND_BYTES), MANY_CHUNKS), chunks_of(LARGE_SEND_BYTES))
    if overlapped and num_tokens >= 2 * MIN_FUSED_CHUNK:
        num_chunks = max(2, num_chunks)
    chunk = -(-num_tokens // num_chunks)
    return chunk if num_chunks == 1 or chunk < 16 * ROWS_TOGETHER else -(-chunk // ROWS_TOGETHER) * ROWS_TOGETHER


def round_rows(chunk: int, *, top_k: int, num_ranks: int) -> int:
    """Return the rows that a rank takes per round: 1.5 times the even load of chunks of `chunk` tokens."""
    return min(num_ranks * chunk * top_k, max(3 * chunk * top_k // 2, MIN_ROUND_ROWS))
