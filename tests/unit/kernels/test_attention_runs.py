"""Runs cover every real token once, at its own position, and share blocks and pages as far as they may."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, ScoreConfig
from rayserve_moe.kernels.tpu.attention_ragged import pages_within_reach, runs_of

PAGE, WIDTH, BLOCK = 4, 16, 4
"""Tokens per page, pages per sequence, tokens per block."""


def blocks_of(*chunks: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Page tables and positions of chunks (first position, number of tokens), each in whole blocks and on its own."""
    tables, positions = [], []
    for sequence, (first, count) in enumerate(chunks):
        for start in range(0, max(count, 1), BLOCK):
            tables.append(100 * sequence + np.arange(WIDTH))
            offsets = start + np.arange(BLOCK)
            positions.append(np.where(offsets < count, first + offsets, -1))
    return np.asarray(tables, np.int32), np.asarray(positions, np.int32)


def described(chunks, *, config=FULL_CAUSAL, most_rows=BLOCK):
    """The runs that count: (rows, number of keys, pages) of each."""
    tables, positions = blocks_of(*chunks)
    runs = runs_of(jnp.asarray(tables), jnp.asarray(positions), PAGE, config, most_rows=most_rows)
    kv_lens, pages, borders, num = (np.asarray(part) for part in runs)
    return [(range(borders[i], borders[i + 1]), int(kv_lens[i]), list(pages[i])) for i in range(num[0])]


CHUNKS = [(5, 11), (0, 0), (0, 1), (30, 8), (2, 3)]


@pytest.mark.parametrize("most_rows", [BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("config", [FULL_CAUSAL, ScoreConfig(window=6)], ids=["full", "window"])
def test_every_token_is_in_one_run_at_its_own_position(config, most_rows):
    tables, positions = blocks_of(*CHUNKS)
    seen = {}
    for rows, kv_len, pages in described(CHUNKS, config=config, most_rows=most_rows):
        for row in rows:
            if positions.reshape(-1)[row] >= 0:
                own_pages = tables[row // BLOCK]
                first_page = int(np.flatnonzero(own_pages == pages[0])[0])
                assert row not in seen
                seen[row] = first_page * PAGE + kv_len - (rows.stop - row)
    assert seen == {row: position for row, position in enumerate(positions.reshape(-1)) if position >= 0}


def test_full_neighbours_share_a_run_within_a_cell():
    assert [len(rows) for rows, _, _ in described([(5, 4 * BLOCK)], most_rows=BLOCK)] == [BLOCK] * 4
    assert [len(rows) for rows, _, _ in described([(5, 4 * BLOCK)], most_rows=2 * BLOCK)] == [2 * BLOCK] * 2
    two_chunks = [(0, BLOCK), (BLOCK, BLOCK)]
    assert len(described(two_chunks, most_rows=2 * BLOCK)) == 2


def test_a_run_gets_only_the_pages_within_reach():
    ((_, kv_len, pages),) = described([(40, BLOCK)], config=ScoreConfig(window=6))
    assert len(pages) == pages_within_reach(WIDTH, PAGE, ScoreConfig(window=6), most_rows=BLOCK) == 3
    assert kv_len <= len(pages) * PAGE


def test_where_nothing_is_real_one_run_keeps_the_kernel_going():
    ((rows, kv_len, _),) = described([(0, 0), (0, 0)])
    assert len(rows) >= 1 and kv_len == 1


def test_single_tokens_are_runs_of_their_own_and_padding_at_the_end_is_left_out():
    positions = jnp.array([[7], [-1], [0], [-1], [-1]])
    tables = jnp.tile(jnp.arange(WIDTH), (5, 1))
    runs = runs_of(tables, positions, PAGE, FULL_CAUSAL, most_rows=1)
    assert runs.num_1[0] == 3
    np.testing.assert_array_equal(runs.kv_lens_S, [8, 1, 1, 1, 1])
    np.testing.assert_array_equal(runs.row_borders[:4], [0, 1, 1, 3])
