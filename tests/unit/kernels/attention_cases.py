"""Paged attention on random pages, its dense definition in float64, and the kernels that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, ScoreConfig
from rayserve_moe.kernels.tpu.attention_ragged import RunKernel, attend_runs, describe_singles

Attend = Callable[..., jax.Array]


def attend_numpy_runs(
    queries: np.ndarray,
    kv_pages: np.ndarray,
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    row_borders: np.ndarray,
    num_runs: np.ndarray,
    *,
    sm_scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> np.ndarray:
    """What jax's kernel computes, in float64: it leaves rows beyond the last run undefined, here NaN."""
    out = np.full(queries.shape, np.nan, queries.dtype)
    group = queries.shape[1] // (kv_pages.shape[2] // 2)
    for run in range(num_runs[0]):
        first, last, kv_len = row_borders[run], row_borders[run + 1], kv_lens[run]
        kv = kv_pages[page_table[run]].reshape(-1, *kv_pages.shape[2:])[:kv_len].astype(np.float64)
        scales = (k_scale or 1.0, v_scale or 1.0)
        keys, values = (np.repeat(kv[:, part::2], group, axis=1) * scales[part] for part in (0, 1))
        scores = np.einsum("qhd,khd->hqk", queries[first:last].astype(np.float64), keys) * sm_scale
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        behind = np.arange(kv_len - (last - first), kv_len)[:, None] - np.arange(kv_len)
        hidden = (behind < 0) | (behind >= (sliding_window or kv_len))
        scores = np.where(hidden, -1e30, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[first:last] = np.einsum("hqk,khd->qhd", weights, values).astype(queries.dtype)
    return out


def call_numpy(queries: jax.Array, *arrays: jax.Array, **scales: float | None) -> jax.Array:
    """`attend_numpy_runs` from a traced program."""
    shape = jax.ShapeDtypeStruct(queries.shape, queries.dtype)
    return jax.pure_callback(partial(_on_host, **scales), shape, queries, *arrays)


def _on_host(*arrays: jax.Array, **scales: float | None) -> np.ndarray:
    return attend_numpy_runs(*(np.asarray(array) for array in arrays), **scales)


def attend_in_runs(
    queries: jax.Array, pages: jax.Array, places: BlockPlaces, *, config: ScoreConfig = FULL_CAUSAL, merged: int = 1
) -> jax.Array:
    """The TPU path with the numpy version in the kernel's place; `merged` blocks may share a run."""
    kernel = RunKernel(call_numpy, queries.shape[1] * merged)
    return attend_runs(queries, pages, places, config=config, kernel=kernel)


def attend_described(
    queries: jax.Array, pages: jax.Array, places: BlockPlaces, *, config: ScoreConfig = FULL_CAUSAL
) -> jax.Array:
    """Single tokens with what is derived of their positions ahead, and padding zeroed by the caller."""
    (_, num_queries, *_), (page_table, positions, *_) = queries.shape, places
    if num_queries > 1:
        return attend_in_runs(queries, pages, places, config=config)
    sizes = {"page_size": pages.shape[1], "table_width": page_table.shape[1]}
    described = describe_singles(positions[:, 0], **sizes, windows=(config.window,))[config.window]
    attended = attend_in_runs(queries, pages, BlockPlaces(page_table, positions, described), config=config)
    return jnp.where((positions >= 0)[..., None, None], attended, 0)


KERNELS: dict[str, Attend] = {
    "reference": jax.jit(attention_reference.attend, static_argnames="config"),
    "runs": jax.jit(attend_in_runs, static_argnames="config"),
    "described": jax.jit(attend_described, static_argnames="config"),
    "merged_runs": jax.jit(partial(attend_in_runs, merged=4), static_argnames="config"),
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
        self.pages = generator.standard_normal((num_pages, page_size, 2 * num_kv_heads, width)).astype(np.float32)
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
        num_heads, num_kv_heads = self.queries.shape[2], self.pages.shape[2] // 2
        for block, query in np.ndindex(self.positions.shape):
            position = int(self.positions[block, query])
            if position < 0:
                continue
            kv = np.asarray(self.pages, np.float64)[self.page_table[block]].reshape(-1, *self.pages.shape[2:])
            seen = [key for key in range(position + 1) if sees(position, key, config)]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = kv[seen, 2 * kv_head] @ np.asarray(self.queries[block, query, head], np.float64)
                scores *= config.scale_for(self.queries.shape[-1])
                if config.soft_cap:
                    scores = config.soft_cap * np.tanh(scores / config.soft_cap)
                weights = np.exp(scores - scores.max())
                out[block, query, head] = weights @ kv[seen, 2 * kv_head + 1] / weights.sum()
        return out

    def run(self, kernel: Attend, config: ScoreConfig = FULL_CAUSAL) -> np.ndarray:
        arrays = (self.queries, self.pages, self.page_table, self.positions)
        queries, pages, *places = (jnp.asarray(array) for array in arrays)
        return np.asarray(kernel(queries, pages, BlockPlaces(*places), config=config))


def sees(position: int, key: int, config: ScoreConfig) -> bool:
    """Whether a query at `position` sees `key`, which is not later."""
    return not config.window or position - key < config.window
