"""Chunks cover all tokens, rounds hold more than the even load, and buffers stop growing with the step."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.experts.tokens import (
    LARGE_SEND_BYTES,
    MANY_CHUNKS,
    ROWS_TOGETHER,
    SEND_BYTES,
    chunk_tokens,
    round_rows,
)

MIB = 1 << 20
MODELS = {"30b": {"top_k": 8, "row_bytes": 4096}, "235b": {"top_k": 8, "row_bytes": 8192}}


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 511, 512, 1000, 8192, 8208])
@pytest.mark.parametrize("model", MODELS)
def test_a_chunk_is_neither_empty_nor_too_large(model, num_tokens, overlapped):
    sizes = MODELS[model]
    chunk = chunk_tokens(num_tokens, overlapped=overlapped, **sizes)
    num_chunks = -(-num_tokens // chunk)
    most = LARGE_SEND_BYTES if num_chunks >= MANY_CHUNKS else SEND_BYTES
    assert 1 <= chunk <= num_tokens and chunk * sizes["top_k"] * sizes["row_bytes"] <= 9 * most // 8
    assert chunk * num_chunks - num_tokens < num_chunks * ROWS_TOGETHER, "hardly any padding"
    assert num_chunks == 1 or chunk < 128 or chunk % ROWS_TOGETHER == 0
    if overlapped and num_tokens >= 512:
        assert num_chunks >= 2


@pytest.mark.parametrize("chunk", [1, 16, 512])
@pytest.mark.parametrize("num_ranks", [1, 8, 64])
def test_a_round_holds_more_than_the_even_load_and_no_more_than_there_is(chunk, num_ranks):
    rows = round_rows(chunk, top_k=8, num_ranks=num_ranks)
    assert chunk * 8 <= rows <= num_ranks * chunk * 8
    assert rows == num_ranks * chunk * 8 or rows >= 1.5 * chunk * 8


def exchange_buffer_bytes(
    num_tokens: int, *, top_k: int, num_ranks: int, row_bytes: int, overlapped: bool = False
) -> int:
    """Rows sent, received, computed and returned; an overlapped exchange holds those taken of two chunks, twice."""
    chunk = chunk_tokens(num_tokens, top_k=top_k, row_bytes=row_bytes, overlapped=overlapped)
    num_taken = 4 if overlapped and chunk < num_tokens else 2
    taken = round_rows(chunk, top_k=top_k, num_ranks=num_ranks)
    return (2 * chunk * top_k + num_taken * taken) * row_bytes


@pytest.mark.parametrize(("model", "num_ranks"), [("30b", 8), ("235b", 32), ("235b", 64)])
def test_buffers_stay_small_in_a_large_step(model, num_ranks):
    sizes = {"num_ranks": num_ranks, **MODELS[model]}
    assert exchange_buffer_bytes(16, **sizes) <= 8 * MIB
    assert exchange_buffer_bytes(1024, overlapped=True, **sizes) <= 129 * MIB
    assert exchange_buffer_bytes(8192, **sizes) <= 121 * MIB
    assert exchange_buffer_bytes(8192, overlapped=True, **sizes) <= 193 * MIB
    assert exchange_buffer_bytes(65536, overlapped=True, **sizes) <= 193 * MIB


@pytest.mark.parametrize("num_ranks", [8, 32])
def test_evenly_routed_tokens_cost_no_more_than_a_row_per_assignment_each_way(num_ranks):
    """With the counts that announce them: 512 tokens of 4096 bytes, 128 experts, 8 per token."""
    generator = np.random.default_rng(4)
    slots = np.argsort(generator.random((512, 128)), axis=1)[:, :8]
    rows = 2 * int((slots // (128 // num_ranks) != 0).sum())
    counts = (num_ranks - 1) * 128 * 4
    assert rows * 4096 + counts <= 1.0 * (2 * 512 * 8 * 4096)
