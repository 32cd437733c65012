"""Tables of kernels whose results for a row do not depend on how many rows a step has.

On CPUs products, norms, softmax and sums over rows run in blocks of a fixed number of rows (`row_blocks`), attention in
blocks of a fixed number of queries, and experts in blocks of a fixed number of assignments.

On TPUs kernels of our own add up a row in one order for any number of rows, so the same kernels compute steps of all
sizes. XLA computes everything else in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_layer import attend_layer
from rayserve_moe.kernels.block_index import choose_layer_blocks
from rayserve_moe.kernels.candidates import NO_CANDIDATES, operation
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
from rayserve_moe.kernels.row_blocks import ROWS_PER_BLOCK, ByRows, in_blocks
from rayserve_moe.kernels.token_index import choose_layer_tokens
from rayserve_moe.kernels.tpu import add_norm as tpu_add_norm

QUERIES_PER_PART = 8
"""Queries of a block of attention. A single token costs as much as a full block."""
TPU_ROWS_PER_BLOCK = 256
"""Rows of a block on TPUs: they are multiplied while their weights are read, so few rows cost as much as a block."""
in_tpu_blocks: ByRows = partial(in_blocks, size=TPU_ROWS_PER_BLOCK)
"""Applies a function to blocks of rows on TPUs."""


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


def by_first(function: Callable[..., Any], by_rows: ByRows = in_blocks) -> Callable[..., Any]:
    """Return a function that applies `function` to blocks of its first argument's rows."""

    def compute(rows: jax.Array, *others: Any, **named: Any) -> Any:
        return by_rows(lambda block: function(block, *others, **named), rows)

    return compute


def gated_mlp(
    hidden_TD: jax.Array,
    weights: Any,
    *,
    adapters: LayerAdapters | None = None,
    by_rows: ByRows = in_blocks,
    **named: Any,
) -> jax.Array:
    """Compute `layers.gated_mlp` in blocks."""

    def compute(rows: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        hidden_TD, place_T = rows
        own = None if adapters is None or place_T is None else adapters.for_rows(place_T)
        return layers.gated_mlp(hidden_TD, weights, adapters=own, **named)

    return by_rows(compute, (hidden_TD, adapters and adapters.tokens.place_T))


def add_and_norm(
    hidden_TD: jax.Array, added_TD: jax.Array, scale_LD: jax.Array, *, layer: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Compute `layers.add_and_norm` in blocks."""
    return in_blocks(lambda rows: layers.add_and_norm(*rows, scale_LD, layer=layer, eps=eps), (hidden_TD, added_TD))


def masses_of(logits_SV: jax.Array, temperature_S: jax.Array, num_words: jax.Array) -> layers.WordMasses:
    """Compute `layers.masses_of` in blocks."""
    return in_blocks(lambda rows: layers.masses_of(*rows, num_words), (logits_SV, temperature_S))


def masses_in_rows(logits_SV: jax.Array, temperature_S: jax.Array, num_words: jax.Array) -> layers.WordMasses:
    """Compute `layers.masses_of` in blocks for TPUs, with the words of a row side by side in memory.

    XLA chooses the layout of a block by the program around it, and the order of a sum by the layout.
    """

    def compute(rows: tuple[jax.Array, jax.Array]) -> layers.WordMasses:
        logits_SV, temperature_S = rows
        return layers.masses_of(with_layout_constraint(logits_SV, Layout((0, 1))), temperature_S, num_words)

    return in_tpu_blocks(compute, (logits_SV, temperature_S))


def gumbel_noise(
    seed_S: jax.Array,
    choice_S: jax.Array,
    position_S: jax.Array,
    *,
    first: jax.Array,
    size: int,
    by_rows: ByRows = in_blocks,
) -> jax.Array:
    """Compute `layers.gumbel_noise` in blocks."""
    return by_rows(lambda rows: layers.gumbel_noise(*rows, first=first, size=size), (seed_S, choice_S, position_S))


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


def invariant_on_tpus(kernels: Kernels, *, name: str) -> Kernels:
    """Return a table of a TPU's kernels that adds up a row in one order in every step.

    Kernels that only small steps can take are left out, except for low-latency dispatch: it adds up the results of
    experts as `device_sums` does (`experts.addition_order`). Other exchanges multiply blocks of assignments.
    """
    by_rows = in_tpu_blocks
    attend = partial(kernels.attention.attend, by_rows=by_rows)
    multiply = partial(expert_products.multiply_in_blocks, block_rows=TPU_ROWS_PER_BLOCK)
    sums = partial(expert_products.sum_results, multiply=multiply, by_rows=by_rows)
    return replace(
        kernels,
        name=name,
        norm=by_first(layers.rms_norm, by_rows),
        mlp=partial(gated_mlp, by_rows=by_rows),
        attention=replace(kernels.attention, attend=attend, norm_and_project=NO_CANDIDATES),
        experts=replace(
            kernels.experts,
            router_scores=by_first(layers.router_scores, by_rows),
            results=operation("invariant", multiply),
            sums=operation("invariant", sums),
            carries_ranks=False,
            choose=NO_CANDIDATES,
            total=layers.total_in_order,  # XLA adds a block of few weights up in lanes or across rows
        ),
        head=replace(kernels.head, logits=by_first(layers.head_logits, by_rows)),
        sampling=SamplingKernels(masses_in_rows, noise=partial(gumbel_noise, by_rows=by_rows)),
        add_norm=operation("add_norm", tpu_add_norm.add_and_norm),
        by_rows=by_rows,
        adds_devices_in_order=True,
        # Otherwise XLA leaves out roundings where it fuses operations, which depends on the rows of a step.
        compiler_options={**kernels.compiler_options, "xla_allow_excess_precision": False},
    )
