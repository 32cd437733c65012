"""Tables of kernels whose results for a row do not depend on how many rows a step has.

Products, norms, softmax and sums over rows run in blocks of a fixed number of rows (`row_blocks`), attention in blocks
of a fixed number of queries, and experts in blocks of a fixed number of assignments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_layer import attend_layer
from rayserve_moe.kernels.block_index import choose_layer_blocks
from rayserve_moe.kernels.candidates import operation
from rayserve_moe.kernels.latent_attention import attend_latent_layer
from rayserve_moe.kernels.operations import (
    DEVICE_SUMS,
    AttentionKernels,
    ExpertKernels,
    HeadKernels,
    Kernels,
    SamplingKernels,
)
from rayserve_moe.kernels.reference import attention, block_index, expert_products, layers, token_index
from rayserve_moe.kernels.reference import device_sums as reference_sums
from rayserve_moe.kernels.reference.attention import BlockPlaces, in_parts
from rayserve_moe.kernels.row_blocks import ROWS_PER_BLOCK, in_blocks
from rayserve_moe.kernels.token_index import choose_layer_tokens

QUERIES_PER_PART = 8
"""Queries of a block of attention. A single token costs as much as a full block."""


def attend(queries_BQHh: jax.Array, kv_pages: jax.Array, places: BlockPlaces, **knobs: Any) -> jax.Array:
    """Compute `reference.attention.attend` in parts."""

    def compute(queries: tuple[jax.Array, ...], places: BlockPlaces) -> jax.Array:
        return attention.attend(*queries, kv_pages, places, **knobs)

    return in_parts(compute, (queries_BQHh,), places, rows_per_part=QUERIES_PER_PART)


def choose_by_parts(*scoring: Any, choose: Callable[..., jax.Array], **knobs: Any) -> jax.Array:
    """Choose tokens or blocks in parts; `scoring` are arrays of queries, then the pool of keys and the places."""
    *arrays, key_pages, places = scoring

    def compute(arrays: tuple[jax.Array, ...], places: BlockPlaces) -> jax.Array:
        return choose(*arrays, key_pages, places, **knobs)

    return in_parts(compute, tuple(arrays), places, rows_per_part=QUERIES_PER_PART)


HEADS = AttentionKernels(partial(attend_layer, decode=attend, prefill=attend, by_rows=in_blocks))
"""Grouped-query attention."""
BLOCKS = replace(
    HEADS,
    choose_blocks=partial(
        choose_layer_blocks, choose=partial(choose_by_parts, choose=block_index.choose_blocks), by_rows=in_blocks
    ),
)
"""Block-sparse attention."""
LATENTS = AttentionKernels(partial(attend_latent_layer, decode=attend, prefill=attend, by_rows=in_blocks))
"""Latent attention."""
SPARSE_LATENTS = replace(
    LATENTS,
    choose_tokens=partial(
        choose_layer_tokens, choose=partial(choose_by_parts, choose=token_index.choose_tokens), by_rows=in_blocks
    ),
)
"""Sparse latent attention."""


def by_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies `function` to blocks of its first argument's rows."""

    def compute(rows: jax.Array, *others: Any, **named: Any) -> Any:
        return in_blocks(lambda block: function(block, *others, **named), rows)

    return compute


def gated_mlp(hidden_TD: jax.Array, weights: Any, *, adapters: LayerAdapters | None = None, **named: Any) -> jax.Array:
    """Compute `layers.gated_mlp` in blocks."""

    def compute(rows: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        hidden_TD, place_T = rows
        own = None if adapters is None or place_T is None else adapters.for_rows(place_T)
        return layers.gated_mlp(hidden_TD, weights, adapters=own, **named)

    return in_blocks(compute, (hidden_TD, adapters and adapters.tokens.place_T))


def add_and_norm(
    hidden_TD: jax.Array, added_TD: jax.Array, scale_LD: jax.Array, *, layer: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Compute `layers.add_and_norm` in blocks."""
    return in_blocks(lambda rows: layers.add_and_norm(*rows, scale_LD, layer=layer, eps=eps), (hidden_TD, added_TD))


def masses_of(logits_SV: jax.Array, temperature_S: jax.Array, num_words: jax.Array) -> layers.WordMasses:
    """Compute `layers.masses_of` in blocks."""
    return in_blocks(lambda rows: layers.masses_of(*rows, num_words), (logits_SV, temperature_S))


def gumbel_noise(
    seed_S: jax.Array, choice_S: jax.Array, position_S: jax.Array, *, first: jax.Array, size: int
) -> jax.Array:
    """Compute `layers.gumbel_noise` in blocks."""
    return in_blocks(lambda rows: layers.gumbel_noise(*rows, first=first, size=size), (seed_S, choice_S, position_S))


def invariant(kernels: Kernels, *, name: str) -> Kernels:
    """Return a table of XLA's kernels that computes every operation in blocks of fixed sizes."""
    multiply = partial(expert_products.multiply_in_blocks, block_rows=ROWS_PER_BLOCK)
    sums = partial(expert_products.sum_results, multiply=multiply, by_rows=in_blocks)
    device_sums = replace(DEVICE_SUMS.run, sum_experts=partial(reference_sums.sum_experts, multiply=multiply))
    return replace(
        kernels,
        name=name,
        norm=by_first(layers.rms_norm),
        rotation=by_first(layers.rotation_of),
        mlp=gated_mlp,
        attention=HEADS,
        experts=ExpertKernels(
            by_first(layers.router_scores),
            operation("invariant", multiply),
            operation("invariant", sums),
            device_sums=replace(DEVICE_SUMS, run=device_sums),
        ),
        head=HeadKernels(by_first(layers.head_logits), tied_rows=layers.take_rows),
        sampling=SamplingKernels(masses_of, noise=gumbel_noise),
        add_norm=operation("invariant", add_and_norm),
        by_rows=in_blocks,
    )
