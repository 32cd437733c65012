"""Expert parallelism by exchange: tokens travel to the ranks that hold their experts, and results travel back.

The devices of a tensor group see the same tokens; each dispatches its own part of them, and the group shares the sums.
"""

# T tokens   D model width   K experts per token   G chunks   C rows of a round

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.exchange import Chunk, ExchangeConfig, Multiply, exchange_chunk
from rayserve_moe.experts.slot_mapping import PlacementArrays, choose_slots
from rayserve_moe.experts.tokens import RoutedTokens, chunk_tokens, cut_into_chunks, round_rows, take_part
from rayserve_moe.kernels.expert_products import ExpertWeights, ProductConfig
from rayserve_moe.kernels.registry import Kernel
from rayserve_moe.parallel.sharding import DATA, TENSOR

RunChunks = Callable[..., jax.Array]


def apply_all_to_all(
    tokens: RoutedTokens,
    weights: ExpertWeights,
    *,
    layer: jax.Array,
    config: ExpertConfig,
    maps: PlacementArrays | None,
) -> jax.Array:
    """The MoE sum of each token [T, D], one chunk of tokens after the other."""
    chunk = tokens_per_chunk(tokens, config, overlapped=False)
    multiply = multiply_local_slots(weights, layer=layer, config=config, chunk=chunk)
    return apply_exchanged(
        tokens, partial(run_in_turn, multiply=multiply), layer=layer, chunk=chunk, config=config, maps=maps
    )


def run_in_turn(chunks: Chunk, *, multiply: Multiply, config: ExchangeConfig) -> jax.Array:
    """Exchange chunks [G, ...] one after the other; returns [G, T, D]."""

    def run(chunk: Chunk) -> jax.Array:
        return exchange_chunk(chunk, multiply=multiply, config=config)

    return jax.lax.map(run, chunks)


def tokens_per_chunk(tokens: RoutedTokens, config: ExpertConfig, *, overlapped: bool) -> int:
    """How many of its tokens a device exchanges at once."""
    return chunk_tokens(
        -(-len(tokens.valid_T) // config.plan.tensor_size),
        top_k=config.top_k,
        row_bytes=tokens.hidden_TD.shape[1] * tokens.hidden_TD.dtype.itemsize,
        overlapped=overlapped,
    )


def apply_exchanged(
    tokens: RoutedTokens,
    run: RunChunks,
    *,
    layer: jax.Array,
    chunk: int,
    config: ExpertConfig,
    maps: PlacementArrays | None,
) -> jax.Array:
    """Take this device's part of the tokens, exchange it in chunks by `run`, and share the sums: [T, D]."""
    plan, (num_tokens, width) = config.plan, tokens.hidden_TD.shape
    part = take_part(tokens, plan.tensor_rank(), num_parts=plan.tensor_size)
    hidden_GTD, ids_GTK, gates_GTK, valid_GT = cut_into_chunks(part, chunk)

    def choose(ids_TK: jax.Array, valid_T: jax.Array) -> jax.Array:
        return choose_slots(ids_TK, valid_T, maps, layer=layer, rank=plan.expert_rank(), config=config)

    # Each chunk divides its tokens over an expert's slots by their shares, so that ranks are even in every chunk.
    with jax.named_scope("dispatch"):
        slots_GTK = jax.vmap(choose)(ids_GTK, valid_GT)
    exchange = ExchangeConfig(
        axes=(DATA, TENSOR),
        num_ranks=plan.num_expert_ranks,
        num_slots=config.num_slots,
        round_rows=round_rows(chunk, top_k=config.top_k, num_ranks=plan.num_expert_ranks),
    )
    out_TD = run(Chunk(hidden_GTD, slots_GTK, gates_GTK), config=exchange).reshape(-1, width)[: len(part.valid_T)]
    if plan.tensor_size > 1:
        with jax.named_scope("combine"):
            out_TD = jax.lax.all_gather(out_TD, TENSOR, axis=0, tiled=True)
    return out_TD[:num_tokens]


def multiply_local_slots(weights: ExpertWeights, *, layer: jax.Array, config: ExpertConfig, chunk: int) -> Multiply:
    """The product of received rows with this layer's local slots."""
    mean_rows = chunk * config.top_k * config.plan.num_expert_ranks / config.num_experts
    product = ProductConfig(config.num_local_slots, mean_rows)
    first_slot = layer * config.num_local_slots
    return multiply_rows(weights, kernel=config.kernels.expert_results, first_slot=first_slot, config=product)


def multiply_rows(
    weights: ExpertWeights, *, kernel: Kernel, first_slot: jax.Array | int, config: ProductConfig
) -> Multiply:
    """The grouped product of rows that belong to one local slot each, by `Kernels.expert_results`."""

    def multiply(rows_CQV: jax.Array, slots_C: jax.Array) -> jax.Array:
        with jax.named_scope("experts"):
            return kernel(rows_CQV, slots_C[:, None], weights, first_slot=first_slot, config=config)[:, 0]

    return multiply
