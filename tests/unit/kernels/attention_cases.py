"""Paged attention on random pages, its dense definition in float64, and the kernels that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, ScoreConfig

Attend = Callable[..., jax.Array]


KERNELS: dict[str, Attend] = {
    "reference": jax.jit(attention_reference.attend, static_argnames="config"),
}


class Case:
    """Sequences with random keys and values on scattered pages, and query blocks at their ends."""

    def __init__(self, *, page_size: int, num_heads: int, num_kv_heads: int, blocks: list[tuple[int, int]]) -> None:
        """`blocks` are (position of the first query, number of queries), one block each of the longest such number."""
        generator = np.random.default_rng(17)
        width, longest = 8, max(first + count for first, count in blocks)
        pages_per_row = -(-longest // page_size) + 1
        num_pages = len(blocks) * pages_per_row + 1
        self.num_queries = max(count for _, count in blocks)
        self.pages = generator.standard_normal((num_pages, page_size, num_kv_heads, 2 * width)).astype(np.float32)
        scattered = generator.permutation(np.arange(1, num_pages)).astype(np.int32)
        self.page_table = scattered[: len(blocks) * pages_per_row].reshape(len(blocks), pages_per_row)
        shape = (len(blocks), self.num_queries, num_heads, width)
        self.queries = generator.standard_normal(shape).astype(np.float32)
        self.positions = np.full(shape[:2], -1, np.int32)
        for block, (first, count) in enumerate(blocks):
            self.positions[block, :count] = np.arange(first, first + count)

    def dense(self, config: ScoreConfig = FULL_CAUSAL) -> np.ndarray:
        """The definition: softmax over the positions that a query sees."""
        out = np.zeros(self.queries.shape)
        (num_heads, width), num_kv_heads = self.queries.shape[2:], self.pages.shape[2]
        for block, query in np.ndindex(self.positions.shape):
            position = int(self.positions[block, query])
            if position < 0:
                continue
            kv = np.asarray(self.pages, np.float64)[self.page_table[block]].reshape(-1, *self.pages.shape[2:])
            seen = [key for key in range(position + 1) if sees(position, key, config)]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = kv[seen, kv_head, :width] @ np.asarray(self.queries[block, query, head], np.float64)
                scores *= config.scale_for(width)
                if config.soft_cap:
                    scores = config.soft_cap * np.tanh(scores / config.soft_cap)
                weights = np.exp(scores - scores.max())
                out[block, query, head] = weights @ kv[seen, kv_head, width:] / weights.sum()
        return out

    def run(self, kernel: Attend, config: ScoreConfig = FULL_CAUSAL) -> np.ndarray:
        arrays = (self.queries, self.pages, self.page_table, self.positions)
        queries, pages, *places = (jnp.asarray(array) for array in arrays)
        return np.asarray(kernel(queries, pages, BlockPlaces(*places), config=config))


def sees(position: int, key: int, config: ScoreConfig) -> bool:
    """Whether a query at `position` sees `key`, which is not later."""
    return not config.window or position - key < config.window
