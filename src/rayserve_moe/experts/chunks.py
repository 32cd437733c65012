"""Sizes of an exchange: tokens per chunk, rows per round, and the bytes of the buffers.

Tokens are exchanged chunk by chunk, so that buffers do not grow with the step. Within a chunk a rank takes at most
`round_rows` rows at once; what does not fit comes in further rounds, as many as the fullest rank needs. So no token is
ever dropped, and buffers hold one and a half times the even load instead of the worst case, `num_ranks` times as much.
"""

from __future__ import annotations

SEND_BYTES = 16 << 20
"""Rows that a device sends per chunk at most: large enough that a chunk's products outlast reading the weights."""

LEAST_ROUND_ROWS = 256
"""Rows that are always taken at once: at decode a few hot experts are common and buffers are small."""

LEAST_FUSED_CHUNK = 256
"""Tokens that a chunk keeps when a step is cut only to overlap: each further chunk reads the weights anew."""


def chunk_tokens(num_tokens: int, *, top_k: int, row_bytes: int, overlapped: bool = False) -> int:
    """Tokens of this device per chunk; an `overlapped` exchange has two chunks or more as soon as they are not small.

    `row_bytes` is the size of one token's hidden state.
    """
    num_chunks = -(-num_tokens // max(1, SEND_BYTES // (top_k * row_bytes)))
    if overlapped and num_tokens >= 2 * LEAST_FUSED_CHUNK:
        num_chunks = max(2, num_chunks)
    return -(-num_tokens // max(1, num_chunks))


def round_rows(chunk: int, *, top_k: int, num_ranks: int) -> int:
    """Rows that a rank takes per round where each rank sends the picks of `chunk` tokens: 1.5 times the even load."""
    return min(num_ranks * chunk * top_k, max(3 * chunk * top_k // 2, LEAST_ROUND_ROWS))


def exchange_buffer_bytes(
    num_tokens: int, *, top_k: int, num_ranks: int, row_bytes: int, overlapped: bool = False
) -> int:
    """Bytes of the exchange's own buffers on a device that dispatches `num_tokens`: sent, received, results, returned.

    An overlapped exchange holds what was received of two chunks. What the grouped product needs comes on top.
    """
    chunk = chunk_tokens(num_tokens, top_k=top_k, row_bytes=row_bytes, overlapped=overlapped)
    num_taken = 3 if overlapped and chunk < num_tokens else 2
    taken = round_rows(chunk, top_k=top_k, num_ranks=num_ranks)
    return (2 * chunk * top_k + num_taken * taken) * row_bytes
