"""Index of sparse attention of a layer over paged keys: from normed tokens to the positions that each token sees."""

# T tokens   D model width   L layers   R query latent   A index heads   d width of a head   i heads * d
# B blocks   Q tokens per block   K chosen tokens

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.adapters import LayerAdapters
from rayserve_moe.kernels.attention_layer import AttentionInputs, ProjectedRows, TokenBatch
from rayserve_moe.kernels.kv_pool import write_rows
from rayserve_moe.kernels.latent_attention import query_latents
from rayserve_moe.kernels.reference.attention import BlockPlaces
from rayserve_moe.kernels.reference.layers import Rotation, layer_norm, project, rotate
from rayserve_moe.kernels.row_blocks import ByRows, at_once
from rayserve_moe.parallel.sharding import ParallelPlan

TokenChoice = Callable[..., jax.Array]
"""The signature of `reference.token_index.choose_tokens`."""
INDEX = ("index_q_LRi", "index_k_LDd", "index_k_norm_Ld", "index_k_norm_bias_Ld", "index_weights_LDA")
"""Parameters of an index besides those of the queries' latents."""
QUERY_LATENTS = ("q_a_LDR", "q_a_norm_LR", "q_a_bias_LR")


@dataclass(frozen=True)
class IndexConfig:
    """Constants of an index, the same in all layers."""

    num_heads: int
    """Heads of queries."""
    top_k: int
    """Tokens that a token sees."""
    latent_eps: float
    """Epsilon of the norm of the queries' latents."""
    key_eps: float
    """Epsilon of the layer norm of keys."""
    interleaved_rotation: bool = False
    """See `layers.rotate`."""
    plan: ParallelPlan | None = None
    """Devices that share the choice; None: this device chooses for all tokens."""


def choose_layer_tokens(  # noqa: PLR0913 (kernels, by keyword)
    normed_TD: jax.Array,
    key_pages: jax.Array,
    inputs: AttentionInputs,
    *,
    config: IndexConfig,
    choose: TokenChoice,
    rows_of: Callable[[jax.Array], jax.Array] = jnp.asarray,
    by_rows: ByRows = at_once,
) -> tuple[jax.Array, jax.Array]:
    """Return the positions that each token sees, int32 [T, K], and the pool with the keys of the new tokens.

    `key_pages` is [L * pages, page, 1, d], or has the rows of `rows_of`, as in `latent_attention`.
    """
    weights, batch, rotation, layer, *_ = inputs
    batch, first_page, _ = batch.of_layer(layer, key_pages, len(weights["index_k_LDd"]))
    of_layer = {name: weights[name][layer] for name in (*INDEX, *QUERY_LATENTS) if name in weights}
    with jax.named_scope("index_projections"):

        def project_part(part: ProjectedRows) -> tuple[jax.Array, jax.Array, jax.Array]:
            own = part.adapters(inputs.adapters)
            queries_TAd = _queries(part.normed_TD, of_layer, part.rotation, config=config, adapters=own)
            weights_TA = _head_weights(part.normed_TD, of_layer["index_weights_LDA"], queries_TAd.shape[-1])
            return _keys(part.normed_TD, of_layer, part.rotation, config), queries_TAd, weights_TA

        place_T = inputs.adapters and inputs.adapters.tokens.place_T
        keys_T1d, queries_TAd, weights_TA = by_rows(project_part, ProjectedRows(normed_TD, rotation, place_T))
    with jax.named_scope("index_update"):
        slots_T = batch.kv_slots_T + first_page * key_pages.shape[1]
        key_pages = write_rows(key_pages, rows_of(keys_T1d), slots_T)
    with jax.named_scope("index_scores"):
        choose = partial(choose, top_k=config.top_k)
        scoring, places = (queries_TAd, weights_TA), (batch, first_page)
        chosen_TK = choose_in_parts(scoring, key_pages, *places, choose=choose, plan=config.plan)
    return chosen_TK, key_pages


def choose_in_parts(
    scoring: tuple[jax.Array, ...],
    key_pages: jax.Array,
    batch: TokenBatch,
    first_page: jax.Array,
    *,
    choose: TokenChoice,
    plan: ParallelPlan | None,
) -> jax.Array:
    """Choose for single tokens and for prefill blocks, [T, ..., K]; `scoring` are arrays of tokens, queries first.

    The devices of the tensor axis of `plan` choose for a share of the tokens each.
    """
    singles, page_table_BP, parts = batch.num_singles, batch.page_table_BP + first_page, []
    for of_part in (slice(0, singles), slice(singles, None)):
        tables_BP = page_table_BP[of_part]
        if len(tables_BP):
            places = BlockPlaces(tables_BP, batch.positions_T[of_part].reshape(len(tables_BP), -1))
            in_blocks = tuple(each[of_part].reshape(*places.positions_BQ.shape, *each.shape[1:]) for each in scoring)
            own_places, own = _share(places, in_blocks, plan)
            chosen_BQK = _of_all(choose(*own, key_pages, own_places), len(tables_BP), plan)
            parts.append(chosen_BQK.reshape(-1, *chosen_BQK.shape[2:]))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _share(
    places: BlockPlaces, in_blocks: tuple[jax.Array, ...], plan: ParallelPlan | None
) -> tuple[BlockPlaces, tuple[jax.Array, ...]]:
    """Return the blocks that this device chooses for: one in `tensor_size`, as neighbours have similar contexts."""
    num_blocks = len(places.positions_BQ)
    if plan is None or not _is_shared(num_blocks, plan):
        return places, in_blocks
    size, rank = plan.tensor_size, plan.tensor_rank()

    def own(array: jax.Array, fill: int = 0) -> jax.Array:
        widths = ((0, -num_blocks % size), *((0, 0),) * (array.ndim - 1))
        by_rank = jnp.pad(array, widths, constant_values=fill).reshape(-1, size, *array.shape[1:])
        return jax.lax.dynamic_index_in_dim(by_rank, rank, 1, keepdims=False)

    own_places = BlockPlaces(own(places.page_table_BP), own(places.positions_BQ, fill=-1))
    return own_places, tuple(own(each) for each in in_blocks)


def _of_all(chosen_BQK: jax.Array, num_blocks: int, plan: ParallelPlan | None) -> jax.Array:
    """Gather the choice of all blocks from the devices that share them."""
    if plan is None or not _is_shared(num_blocks, plan):
        return chosen_BQK
    by_rank = plan.stack_tensor_ranks(chosen_BQK, dim=1)
    return by_rank.reshape(-1, *chosen_BQK.shape[1:])[:num_blocks]


def _is_shared(num_blocks: int, plan: ParallelPlan) -> bool:
    return plan.tensor_size > 1 and num_blocks > 1


def _keys(normed_TD: jax.Array, weights: Mapping[str, jax.Array], rotation: Rotation, config: IndexConfig) -> jax.Array:
    """Return the cached key of each token, [T, 1, d]."""
    keys_Td = project(normed_TD, weights["index_k_LDd"])
    keys_Td = layer_norm(keys_Td, weights["index_k_norm_Ld"], weights["index_k_norm_bias_Ld"], config.key_eps)
    return rotate(keys_Td[:, None], rotation, interleaved=config.interleaved_rotation)


def _queries(
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    rotation: Rotation,
    *,
    config: IndexConfig,
    adapters: LayerAdapters | None,
) -> jax.Array:
    """Return the queries of each token, [T, A, d]."""
    latents_TR = query_latents(normed_TD, weights, norm_eps=config.latent_eps, adapters=adapters)
    queries_Ti = project(latents_TR, weights["index_q_LRi"])
    queries_TAd = queries_Ti.reshape(len(normed_TD), config.num_heads, -1)
    return rotate(queries_TAd, rotation, interleaved=config.interleaved_rotation)


def _head_weights(normed_TD: jax.Array, weights_DA: jax.Array, width: int) -> jax.Array:
    """Return the weight of each head times the scale of products of `width` elements, float32 [T, A]."""
    weights_TA = jnp.matmul(normed_TD.astype(jnp.float32), weights_DA, precision=jax.lax.Precision.HIGHEST)
    return weights_TA * (weights_DA.shape[1] * width) ** -0.5
