"""Paged attention equals dense softmax attention, whatever the pages look like. New kernels join by their name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_reference import KEYS_PER_SPAN
from rayserve_moe.kernels.kv_update import write_kv
from rayserve_moe.kernels.registry import ATTENTION, KERNELS_OF_PLATFORM

COMPILED = {name: jax.jit(kernel) for name, kernel in ATTENTION.items()}
KERNEL = pytest.mark.parametrize("kernel", COMPILED.values(), ids=COMPILED.keys())


class Case:
    """Sequences with random keys and values on scattered pages, and query blocks at their ends."""

    def __init__(self, *, page_size: int, num_heads: int, num_kv_heads: int, blocks: list[tuple[int, int]]) -> None:
        """`blocks` are (position of the first query, number of queries), one block each of the longest such number."""
        generator = np.random.default_rng(17)
        width, longest = 8, max(first + count for first, count in blocks)
        pages_per_row = -(-longest // page_size) + 1
        num_pages = len(blocks) * pages_per_row + 1
        self.num_queries = max(count for _, count in blocks)
        self.pages = generator.standard_normal((num_pages, page_size, 2 * num_kv_heads, width)).astype(np.float32)
        scattered = generator.permutation(np.arange(1, num_pages)).astype(np.int32)
        self.page_table = scattered[: len(blocks) * pages_per_row].reshape(len(blocks), pages_per_row)
        shape = (len(blocks), self.num_queries, num_heads, width)
        self.queries = generator.standard_normal(shape).astype(np.float32)
        self.positions = np.full(shape[:2], -1, np.int32)
        for block, (first, count) in enumerate(blocks):
            self.positions[block, :count] = np.arange(first, first + count)

    def dense(self) -> np.ndarray:
        """The definition, in float64: softmax over all positions up to the query's own."""
        out = np.zeros(self.queries.shape)
        num_heads, num_kv_heads = self.queries.shape[2], self.pages.shape[2] // 2
        for block, query in np.ndindex(self.positions.shape):
            position = self.positions[block, query]
            if position < 0:
                continue
            kv = (
                self.pages[self.page_table[block]].reshape(-1, *self.pages.shape[2:])[: position + 1].astype(np.float64)
            )
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = kv[:, 2 * kv_head] @ self.queries[block, query, head] / np.sqrt(self.queries.shape[-1])
                weights = np.exp(scores - scores.max())
                out[block, query, head] = weights @ kv[:, 2 * kv_head + 1] / weights.sum()
        return out

    def run(self, kernel) -> np.ndarray:
        arrays = (self.queries, self.pages, self.page_table, self.positions)
        return np.asarray(kernel(*(jnp.asarray(array) for array in arrays)))


@KERNEL
@pytest.mark.parametrize(
    ("page_size", "num_heads", "num_kv_heads"),
    [(1, 4, 4), (3, 6, 2), (16, 3, 1), (16, 6, 2), (KEYS_PER_SPAN, 4, 4), (KEYS_PER_SPAN + 32, 6, 2)],
)
def test_it_is_dense_attention(kernel, page_size, num_heads, num_kv_heads):
    blocks = [(0, 1), (0, 5), (KEYS_PER_SPAN - 2, 5), (2 * KEYS_PER_SPAN + 9, 4)]
    case = Case(page_size=page_size, num_heads=num_heads, num_kv_heads=num_kv_heads, blocks=blocks)
    np.testing.assert_allclose(case.run(kernel), case.dense(), atol=3e-6)


@KERNEL
def test_single_queries_are_dense_attention(kernel):
    blocks = [(position, 1) for position in (0, 1, 15, 16, 127, 128, 129, 300)]
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=blocks)
    np.testing.assert_allclose(case.run(kernel), case.dense(), atol=3e-6)


@KERNEL
def test_padding_gives_zeros_and_costs_others_nothing(kernel):
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(40, 5), (7, 5), (3, 1)])
    before = case.run(kernel)
    case.positions[1] = -1
    after = case.run(kernel)
    assert (after[1] == 0).all() and (after[2, 1:] == 0).all()
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    case.positions[:] = -1
    assert (case.run(kernel) == 0).all()


@KERNEL
def test_a_block_does_not_depend_on_its_company(kernel):
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(20, 5), (300, 5)])
    together = case.run(kernel)[0]
    case.positions[1] = -1
    np.testing.assert_array_equal(case.run(kernel)[0], together)


@KERNEL
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_earlier_owners_left_in_a_page_is_without_effect(kernel, garbage):
    case = Case(page_size=16, num_heads=4, num_kv_heads=2, blocks=[(20, 5), (0, 1), (140, 2)])
    clean = case.run(kernel)
    held = np.zeros(case.pages.shape[:2], bool)
    for block, reach in enumerate(case.positions.max(axis=1)):
        page, offset = np.divmod(np.arange(reach + 1), 16)
        held[case.page_table[block, page], offset] = True
    case.pages[~held] = garbage
    np.testing.assert_array_equal(case.run(kernel), clean)


def test_keys_and_values_are_written_to_their_slots_and_nowhere_else():
    generator = np.random.default_rng(3)
    pages = generator.standard_normal((5, 4, 6, 2)).astype(np.float32)
    keys, values = generator.standard_normal((2, 7, 3, 2)).astype(np.float32)
    slots = np.array([4, 19, 8, 9, 10, 0, 0], np.int32)
    written = np.asarray(write_kv(jnp.asarray(pages), jnp.asarray(keys), jnp.asarray(values), jnp.asarray(slots)))
    flat, old = written.reshape(20, 6, 2), pages.reshape(20, 6, 2)
    for token, slot in enumerate(slots[:5]):
        np.testing.assert_array_equal(flat[slot, 0::2], keys[token])
        np.testing.assert_array_equal(flat[slot, 1::2], values[token])
    others = np.setdiff1d(np.arange(20), slots)
    np.testing.assert_array_equal(flat[others], old[others])


def test_every_kernel_that_a_platform_names_exists():
    for choice in KERNELS_OF_PLATFORM.values():
        assert choice.decode_attention in ATTENTION and choice.prefill_attention in ATTENTION
