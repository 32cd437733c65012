"""Expert parallelism by exchange: tokens travel to the ranks that hold their experts, and results travel back.

The devices of a tensor group see the same tokens; each dispatches its own part of them, and the group shares the sums.
"""

# T tokens   D model width   K experts per token   G chunks   C rows of a round

from __future__ import annotations

import jax

from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.exchange import Chunk, ExchangeConfig, Multiply, run_in_turn, run_overlapped
from rayserve_moe.experts.slot_mapping import PlacedExperts, choose_slots
from rayserve_moe.experts.tokens import RoutedTokens, chunk_tokens, cut_into_chunks, round_rows, take_part
from rayserve_moe.kernels.reference.expert_products import LayerExperts, ProductConfig, widened
from rayserve_moe.kernels.table import Kernel
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import DATA, TENSOR


def apply_all_to_all(
    tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig, overlapped: bool = False
) -> jax.Array:
    """The MoE sum of each token [T, D], one chunk of tokens after the other, or each sent while one is multiplied."""
    plan, (num_tokens, width), top_k = config.plan, tokens.hidden_TD.shape, config.router.top_k
    part = take_part(tokens, plan.tensor_rank(), num_parts=plan.tensor_size)
    row_bytes = width * tokens.hidden_TD.dtype.itemsize
    chunk = chunk_tokens(len(part.valid_T), top_k=top_k, row_bytes=row_bytes, overlapped=overlapped)
    hidden_GTD, ids_GTK, gates_GTK, valid_GT = cut_into_chunks(part, chunk)

    def choose(ids_TK: jax.Array, valid_T: jax.Array) -> jax.Array:
        return choose_slots(ids_TK, valid_T, experts.maps, layer=experts.layer, rank=plan.expert_rank(), config=config)

    # Each chunk divides its tokens over an expert's slots by their shares, so that ranks are even in every chunk.
    with jax.named_scope("dispatch"):
        slots_GTK = jax.vmap(choose)(ids_GTK, valid_GT)
    num_ranks, num_local = plan.num_expert_ranks, config.num_local_slots
    taken = round_rows(chunk, top_k=top_k, num_ranks=num_ranks)
    exchange = ExchangeConfig((DATA, TENSOR), num_ranks, config.num_slots, taken, plan.num_slices)
    product = ProductConfig(num_local, chunk * top_k * num_ranks / config.router.num_experts, config.activation)
    of_layer = LayerExperts(experts.weights, experts.layer * num_local, product)
    if len(hidden_GTD) > 1 and platform_of(plan.mesh) == "tpu":  # otherwise every chunk would convert them
        of_layer = widened(of_layer, tokens.hidden_TD.dtype)
    multiply = multiply_rows(of_layer, kernel=config.kernels.expert_results)
    run = run_overlapped if overlapped else run_in_turn
    out_TD = run(Chunk(hidden_GTD, slots_GTK, gates_GTK), multiply=multiply, config=exchange).reshape(-1, width)
    out_TD = out_TD[: len(part.valid_T)]
    if plan.tensor_size > 1:
        with jax.named_scope("combine"):
            out_TD = jax.lax.all_gather(out_TD, TENSOR, axis=0, tiled=True)
    return out_TD[:num_tokens]


def multiply_rows(experts: LayerExperts, *, kernel: Kernel) -> Multiply:
    """The grouped product of rows that belong to one local slot each, by `Kernels.expert_results`."""

    def multiply(rows_CQV: jax.Array, slots_C: jax.Array) -> jax.Array:
        with jax.named_scope("experts"):
            return kernel(rows_CQV, slots_C[:, None], experts)[:, 0]

    return multiply
