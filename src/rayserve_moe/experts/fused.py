"""Fused expert parallelism as programs of their own: dispatch, grouped product and weighted sum over a mesh.

Inside a step that is sharded already the same is the backend `fused`.
"""

# T tokens   D model width   F expert width   E experts   P expert slots of all ranks   K experts per token   G chunks

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rayserve_moe.experts.all_to_all import multiply_rows
from rayserve_moe.experts.exchange import Chunk, ExchangeConfig, run_overlapped
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.routing import ExpertScores, select_top_k
from rayserve_moe.experts.tokens import RoutedTokens, chunk_tokens, cut_into_chunks, round_rows
from rayserve_moe.kernels.expert_products import ACTIVATIONS, ExpertWeights, LayerExperts, ProductConfig
from rayserve_moe.kernels.registry import KERNELS
from rayserve_moe.parallel.mesh import platform_of


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of a fused program: tokens of a device per chunk, and rows it takes per round; 0 is chosen by size."""

    chunk_tokens: int = 0
    round_rows: int = 0


def fused_ep_moe(  # noqa: PLR0913 (the agreed signature)
    mesh: Mesh,
    tokens: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    w3: jax.Array,
    router_logits: jax.Array,
    *,
    top_k: int,
    renormalize: bool = True,
    act_fn: str = "silu",
    block_config: BlockConfig | None = None,
    dp_axis_name: str = "data",
    tp_axis_name: str = "tensor",
) -> jax.Array:
    """The MoE sum of `tokens` [T, D] by their `router_logits` [T, E], where slot i holds expert i: [T, D].

    All else is as in `fused_ep_moe_from_topk`.
    """
    scores = jax.nn.softmax(router_logits.astype(jnp.float32), axis=-1)
    router = RouterSpec(scores.shape[1], top_k, renormalize)
    topk_ids, topk_weights = select_top_k(ExpertScores(scores), router=router)
    return fused_ep_moe_from_topk(
        mesh,
        tokens,
        w1,
        w2,
        w3,
        topk_ids,
        topk_weights,
        act_fn=act_fn,
        block_config=block_config,
        dp_axis_name=dp_axis_name,
        tp_axis_name=tp_axis_name,
    )


def fused_ep_moe_from_topk(  # noqa: PLR0913 (the agreed signature)
    mesh: Mesh,
    tokens: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    w3: jax.Array,
    topk_ids_physical: jax.Array,
    topk_weights: jax.Array,
    *,
    act_fn: str = "silu",
    block_config: BlockConfig | None = None,
    dp_axis_name: str = "data",
    tp_axis_name: str = "tensor",
) -> jax.Array:
    """The MoE sum of `tokens` [T, D] over slots chosen beforehand: [T, D] in the tokens' dtype.

    `w1` (gate) and `w3` (up) are [P, D, F], `w2` (down) is [P, F, D], split over both axes of the mesh by slots; tokens
    are split over both axes too. `topk_ids_physical` [T, K] are slots; P or beyond is an assignment that goes nowhere.
    `topk_weights` [T, K] are added up in that order. ValueError where slots do not divide by devices, or for an
    unknown activation.
    """
    axes = (dp_axis_name, tp_axis_name)
    num_ranks = mesh.shape[dp_axis_name] * mesh.shape[tp_axis_name]
    (num_tokens, width), (num_slots, *_), top_k = tokens.shape, w1.shape, topk_ids_physical.shape[1]
    if num_slots % num_ranks:
        raise ValueError(f"{num_slots} expert slots do not divide by {num_ranks} devices")
    if act_fn not in ACTIVATIONS:
        raise ValueError(f"activation {act_fn!r} is not one of {', '.join(ACTIVATIONS)}")
    part = -(-num_tokens // num_ranks)
    blocks = block_config or BlockConfig()
    row_bytes = width * tokens.dtype.itemsize
    chunk = blocks.chunk_tokens or chunk_tokens(part, top_k=top_k, row_bytes=row_bytes, overlapped=True)
    taken = blocks.round_rows or round_rows(chunk, top_k=top_k, num_ranks=num_ranks)
    kernel = KERNELS[platform_of(mesh)].expert_results
    product = ProductConfig(num_slots // num_ranks, chunk * top_k * num_ranks / num_slots, act_fn)
    config = ExchangeConfig(axes, num_ranks, num_slots, taken)

    def on_device(routed: RoutedTokens, weights: ExpertWeights) -> jax.Array:
        hidden_GTD, ids_GTK, gates_GTK, valid_GT = cut_into_chunks(routed, chunk)
        slots_GTK = jnp.where(valid_GT[..., None], ids_GTK, num_slots)
        multiply = multiply_rows(LayerExperts(weights, 0, product), kernel=kernel)
        out_GTD = run_overlapped(Chunk(hidden_GTD, slots_GTK, gates_GTK), multiply=multiply, config=config)
        return out_GTD.reshape(-1, width)[:part]

    split = PartitionSpec(axes)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False)
    routed = RoutedTokens(tokens, topk_ids_physical, topk_weights.astype(jnp.float32), jnp.ones(num_tokens, bool))
    whole = RoutedTokens(*(array[0] for array in cut_into_chunks(routed, part * num_ranks)))
    return run(whole, ExpertWeights(w1, w3, w2))[:num_tokens]
