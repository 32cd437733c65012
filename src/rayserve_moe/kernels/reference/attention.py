"""Paged causal attention in plain jnp: the definition of every other attention kernel.

Blocks are computed in sequence. Each visits its keys in spans of a fixed number of positions with an online
softmax (Milakov and Gimelshein, arXiv:1805.02867), from the first key within its reach to its own last position. So the
result and the cost of a block depend on that block alone.
"""

# B query blocks   Q queries per block   H query heads   G KV heads   M queries * query heads per KV head
# h head width   v value width   P page-table width   N pages   S key positions per span

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.kv_pool import read_wide, write_rows

KEYS_PER_SPAN = 128
MASKED = -1e30


@dataclass(frozen=True)
class ScoreConfig:
    """Visible keys of a query besides causality, and the scaling of scores. The default is full causal attention.

    `window` > 0: only the last `window` positions, its own among them. `scale` None stands for h ** -0.5. `soft_cap` >
    0 turns a score s into soft_cap * tanh(s / soft_cap). ValueError for negative numbers.
    """

    window: int = 0
    scale: float | None = None
    soft_cap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("window", "soft_cap"):
            if getattr(self, name) < 0:
                raise ValueError(f"attention {name} must not be negative, found {getattr(self, name)}")

    def scale_for(self, width: int) -> float:
        """Return the factor of the scores of heads of `width`."""
        return width**-0.5 if self.scale is None else self.scale

    def first_key(self, positions: jax.Array) -> jax.Array | None:
        """Return the first position that queries at `positions` see, elementwise; None if that is 0 for all."""
        return jnp.maximum(positions - self.window + 1, 0) if self.window else None


FULL_CAUSAL = ScoreConfig()


class _Visible(NamedTuple):
    """A span's keys seen by each query, bool [M, S], and by any query of the block, bool [S]."""

    each_MS: jax.Array
    any_S: jax.Array


class _Reading(NamedTuple):
    """The elements of a row that are the value of a head, and `block_size` and `unpack` of `attend`."""

    values: slice
    block_size: int
    unpack: Callable[[jax.Array], jax.Array] | None


class Together(NamedTuple):
    """The sequence of each single token, int32 [B]: tokens of a sequence are adjacent, at most `most`, at consecutive
    positions."""

    sequences_B: jax.Array
    most: int


class BlockPlaces(NamedTuple):
    """The places of blocks of queries, int32: the pages of each block's sequence, and the positions of its queries
    (-1: padding).

    `described` is a kernel's input derived from positions ahead of all layers (`AttentionKernels`); with it, a kernel
    may return anything for padding. Without `together`, no two single tokens share a sequence. `chosen_BQK` are the
    positions that queries see, int32, -1 for none, or the blocks of positions that the queries of each KV head see,
    [B, Q, G, K]; None stands for all positions up to their own.
    """

    page_table_BP: jax.Array
    positions_BQ: jax.Array
    described: Any = None
    together: Together | None = None
    chosen_BQK: jax.Array | None = None


class NewRows(NamedTuple):
    """Rows [B, ...] of single tokens as the pool has them, and the page from which their page table counts."""

    rows_BX: jax.Array
    first_page: jax.Array


def attend(  # noqa: PLR0913 (knobs, by keyword)
    queries_BQHh: jax.Array,
    kv_pages: jax.Array,
    places: BlockPlaces,
    *,
    config: ScoreConfig = FULL_CAUSAL,
    sinks_H: jax.Array | None = None,
    latent_width: int = 0,
    value_width: int = 0,
    block_size: int = 0,
    unpack: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Attend each query to the keys of its block's sequence at positions up to its own, within the window of `config`.

    `kv_pages` is [N, page, G, h + v], the value of a head behind its key, in a dtype of `kv_pool`. With a
    `latent_width` of v it is [N, page, G, h]: keys, with values as their first v elements. `value_width` is v without
    `latent_width`, and h if it is 0. A query at position -1 is padding and gives zeros. Rows that a block does not see
    have no effect, even NaN. `sinks_H` are scores of heads, which count in the denominator of their softmax only.
    `block_size` > 0: chosen blocks have that many positions. `unpack` turns rows of another pool into [S, G, h + v].
    Returns [B, Q, H, v] in the queries' dtype.
    """
    width = queries_BQHh.shape[-1]
    value_width = latent_width or value_width or width
    row_width = width + (0 if latent_width else value_width)
    assert unpack or kv_pages.shape[3] == row_width, "rows of other keys and values"
    pages_per_span = max(1, KEYS_PER_SPAN // kv_pages.shape[1])
    page_table_BP = jnp.pad(places.page_table_BP, ((0, 0), (0, -places.page_table_BP.shape[1] % pages_per_span)))

    values = slice(0, latent_width) if latent_width else slice(width, width + value_width)
    read = _Reading(values, block_size, unpack)
    attend_block = partial(_attend_block, config=config, sinks_H=sinks_H, read=read)

    def attend_one(block: tuple[jax.Array, ...]) -> jax.Array:
        return attend_block(block, kv_pages, pages_per_span=pages_per_span)

    blocks = (queries_BQHh, page_table_BP, places.positions_BQ)
    chosen = () if places.chosen_BQK is None else (places.chosen_BQK,)
    return jax.lax.map(attend_one, (*blocks, *chosen))


def attend_new(
    queries_BHh: jax.Array, kv_pages: jax.Array, places: BlockPlaces, new: NewRows, **knobs: Any
) -> tuple[jax.Array, jax.Array]:
    """Write the rows of single tokens at their positions into the pool, then attend it: [B, H, v], and the pool.

    Padding writes into page 0, which no sequence owns. `knobs` are keywords of `attend`.
    """
    (rows_BX, first_page), (page_table_BP, positions_B1, *_), page_size = new, places, kv_pages.shape[1]
    pages_B1 = jnp.take_along_axis(page_table_BP + first_page, jnp.maximum(positions_B1, 0) // page_size, axis=1)
    slots_B1 = jnp.where(positions_B1 >= 0, pages_B1 * page_size + positions_B1 % page_size, 0)
    kv_pages = write_rows(kv_pages, rows_BX, slots_B1[:, 0])
    places = BlockPlaces(page_table_BP + first_page, positions_B1)
    return attend(queries_BHh[:, None], kv_pages, places, **knobs)[:, 0], kv_pages


def in_parts(
    compute: Callable[[tuple[jax.Array, ...], BlockPlaces], jax.Array],
    arrays: tuple[jax.Array, ...],
    places: BlockPlaces,
    *,
    rows_per_part: int,
) -> jax.Array:
    """Compute blocks of queries in parts of `rows_per_part` queries, for single tokens and for prefill.

    The result of a query then does not depend on the number of queries in its block. `arrays` and the result are
    [B, Q, ...]; `compute` sees parts as blocks.
    """
    num_blocks, num_queries = places.positions_BQ.shape
    num_parts = -(-num_queries // rows_per_part)

    def cut(array: jax.Array, fill: int = 0) -> jax.Array:
        padding = ((0, 0), (0, num_parts * rows_per_part - num_queries), *((0, 0),) * (array.ndim - 2))
        padded = jnp.pad(array, padding, constant_values=fill)
        return padded.reshape(num_blocks * num_parts, rows_per_part, *array.shape[2:])

    chosen = None if places.chosen_BQK is None else cut(places.chosen_BQK, -1)
    pages_BP = jnp.repeat(places.page_table_BP, num_parts, axis=0)
    out = compute(tuple(map(cut, arrays)), BlockPlaces(pages_BP, cut(places.positions_BQ, -1), chosen_BQK=chosen))
    return out.reshape(num_blocks, num_parts * rows_per_part, *out.shape[2:])[:, :num_queries]


def _attend_block(
    block: tuple[jax.Array, ...],
    kv_pages: jax.Array,
    *,
    pages_per_span: int,
    config: ScoreConfig,
    sinks_H: jax.Array | None,
    read: _Reading,
) -> jax.Array:
    """Attend a block: queries [Q, H, h], pages [P], positions [Q] and the choice of queries; return [Q, H, v].

    The choice is [Q, K], or [Q, G, K] of blocks.
    """
    queries_QHh, pages_P, positions_Q, *chosen = block
    num_queries, num_heads, width = queries_QHh.shape
    span = pages_per_span * kv_pages.shape[1]
    num_kv_heads = chosen[0].shape[1] if read.block_size and chosen else kv_pages.shape[2]
    group = num_heads // num_kv_heads
    queries = queries_QHh.astype(jnp.float32) * config.scale_for(width)
    queries = queries.reshape(num_queries, num_kv_heads, group, width)
    queries_GMh = queries.transpose(1, 2, 0, 3).reshape(num_kv_heads, group * num_queries, width)
    positions_M = jnp.tile(positions_Q, group)
    last_position = jnp.max(positions_Q)
    first_key = _first_key_of_block(positions_Q, config)
    is_chosen_MS = None
    if chosen:
        is_chosen_MS = _seen_by_choice(*chosen, len(pages_P) * kv_pages.shape[1], read.block_size, group)

    def visit_span(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        rows = kv_pages[jax.lax.dynamic_slice_in_dim(pages_P, i * pages_per_span, pages_per_span)]
        rows_SX = read_wide(rows.reshape(span, *kv_pages.shape[2:]))
        rows_GSX = (read.unpack(rows_SX) if read.unpack else rows_SX).transpose(1, 0, 2)
        keys_GSh, values_GSv = rows_GSX[..., :width], rows_GSX[..., read.values]
        key_positions_S = i * span + jnp.arange(span)
        visible = _visible(key_positions_S, positions_M, last_position, first_key, config)
        if is_chosen_MS is not None:
            here_MS = jax.lax.dynamic_slice_in_dim(is_chosen_MS, i * span, span, axis=-1)
            visible = visible._replace(each_MS=visible.each_MS & here_MS)
        # A weight of zero does not silence what an earlier owner of the page left there: 0 * NaN is NaN.
        values_GSv = jnp.where(visible.any_S[:, None], values_GSv, 0.0)
        return _accumulate(carry, queries_GMh, keys_GSh, values_GSv, visible.each_MS, config)

    value_width = read.values.stop - read.values.start
    start = _start((*queries_GMh.shape[:2], value_width), sinks_H)
    total_GMh, _, weight_GM = jax.lax.fori_loop(first_key // span, last_position // span + 1, visit_span, start)
    out = jnp.where((positions_M >= 0)[:, None], total_GMh / jnp.maximum(weight_GM, 1.0)[..., None], 0.0)
    out = out.reshape(num_kv_heads, group, num_queries, value_width).transpose(2, 0, 1, 3)
    return out.reshape(num_queries, num_heads, value_width).astype(queries_QHh.dtype)


def _seen_by_choice(chosen_QK: jax.Array, num_positions: int, block_size: int, group: int) -> jax.Array:
    """Return True for the chosen positions of the rows of a KV head, bool [M, S], or [G, M, S] by chosen blocks."""
    if not block_size:
        return jnp.tile(_marked(chosen_QK, num_positions), (group, 1))
    num_blocks = -(-num_positions // block_size)
    marked_GQN = jax.vmap(_marked, in_axes=(1, None))(chosen_QK, num_blocks)
    return jnp.tile(jnp.repeat(marked_GQN, block_size, axis=-1)[..., :num_positions], (1, group, 1))


def _marked(chosen_QK: jax.Array, num_positions: int) -> jax.Array:
    """Return True for the chosen positions of each query, bool [Q, S]."""
    places_QK = jnp.where(chosen_QK >= 0, chosen_QK, num_positions)
    nothing_QS = jnp.zeros((len(chosen_QK), num_positions), jnp.bool)
    return nothing_QS.at[jnp.arange(len(chosen_QK))[:, None], places_QK].set(True, mode="drop")


def _start(shape_GMv: tuple[int, ...], sinks_H: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the carry of `_accumulate` ahead of the first span: nothing seen, or the sink of each head.

    A sink is a key that every query sees, with a value of zero (gpt-oss, arXiv:2508.10925; StreamingLLM,
    arXiv:2309.17453). After a key of score s the largest score is s, the sum of weights exp(s - s) = 1, and the total
    its value: zero.
    """
    num_kv_heads, num_rows, _ = shape_GMv
    if sinks_H is None:
        return jnp.zeros(shape_GMv), jnp.full(shape_GMv[:2], MASKED), jnp.zeros(shape_GMv[:2])
    sinks_Gg = sinks_H.astype(jnp.float32).reshape(num_kv_heads, -1)
    largest_GM = jnp.repeat(sinks_Gg, num_rows // sinks_Gg.shape[1], axis=1)
    return jnp.zeros(shape_GMv), largest_GM, jnp.ones(shape_GMv[:2])


def _first_key_of_block(positions_Q: jax.Array, config: ScoreConfig) -> jax.Array | int:
    """Return the first position that any real query of a block sees; beyond all keys without real queries."""
    first_Q = config.first_key(positions_Q)
    return 0 if first_Q is None else jnp.min(jnp.where(positions_Q >= 0, first_Q, jnp.iinfo(jnp.int32).max))


def _visible(
    key_positions_S: jax.Array,
    positions_M: jax.Array,
    last_position: jax.Array,
    first_key: jax.Array | int,
    config: ScoreConfig,
) -> _Visible:
    each_MS = key_positions_S <= positions_M[:, None]
    any_S = key_positions_S <= last_position
    first_M = config.first_key(positions_M)
    if first_M is not None:
        each_MS &= key_positions_S >= first_M[:, None]
        any_S &= key_positions_S >= first_key
    return _Visible(each_MS, any_S)


def _accumulate(
    carry: tuple[jax.Array, ...],
    queries_GMh: jax.Array,
    keys_GSh: jax.Array,
    values_GSv: jax.Array,
    visible_MS: jax.Array,
    config: ScoreConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Take a span of the online softmax; the carry is weighted values, largest score, and sum of weights so far.

    A real query sees at least itself. If it sees nothing of a later span, its largest score is real and the span's
    weights vanish; its sums from spans that end before its first key vanish with its first real score.
    """
    total, largest, weight = carry
    scores = jnp.einsum("GMh,GSh->GMS", queries_GMh, keys_GSh, precision=jax.lax.Precision.HIGHEST)
    if config.soft_cap:
        scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    scores = jnp.where(visible_MS, scores, MASKED)
    new_largest = jnp.maximum(largest, scores.max(-1))
    shrink = jnp.exp(largest - new_largest)
    weights = jnp.exp(scores - new_largest[..., None])
    values = jnp.einsum("GMS,GSv->GMv", weights, values_GSv, precision=jax.lax.Precision.HIGHEST)
    return total * shrink[..., None] + values, new_largest, weight * shrink + weights.sum(-1)
