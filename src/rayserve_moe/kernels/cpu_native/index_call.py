"""The native indexes of sparse attention as functions of arrays (see `calls`)."""

# T tokens   D model width   A index heads   K chosen tokens or blocks

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.attention_layer import AttentionInputs
from rayserve_moe.kernels.block_index import BlockIndexConfig
from rayserve_moe.kernels.cpu_native.adapters import adapter_arguments
from rayserve_moe.kernels.cpu_native.calls import BLOCK_MATRICES, INDEX_MATRICES, INDEX_VECTORS, PREFIX
from rayserve_moe.kernels.token_index import IndexConfig


def choose_layer_tokens(
    normed_TD: jax.Array, key_pages: jax.Array, inputs: AttentionInputs, *, config: IndexConfig
) -> tuple[jax.Array, jax.Array]:
    """Compute `token_index.choose_layer_tokens` with packed weights; the pool is updated in place.

    It rounds at the same places. Queries and scores are computed for tokens that do not see all others only.
    """
    weights, batch = inputs.weights, inputs.batch
    num_chosen = min(config.top_k, batch.page_table_BP.shape[-1] * key_pages.shape[1])
    shapes = (
        jax.ShapeDtypeStruct((len(normed_TD), num_chosen), jnp.int32),
        jax.ShapeDtypeStruct(key_pages.shape, key_pages.dtype),
    )
    call = jax.ffi.ffi_call(f"{PREFIX}index", shapes, input_output_aliases={17: 1})
    chosen_TK, key_pages = call(
        normed_TD,
        weights["q_a_LDR"],
        weights["q_a_norm_LR"],
        weights.get("q_a_bias_LR", jnp.zeros((0, 0), jnp.bfloat16)),
        *(weights[name] for name in (*INDEX_MATRICES, *INDEX_VECTORS)),
        *_places(normed_TD, key_pages, inputs),
        key_pages,
        *adapter_arguments(inputs.adapters, ("q_a_LDR",)),
        num_singles=np.int64(batch.num_singles),
        latent_eps=np.float32(config.latent_eps),
        key_eps=np.float32(config.key_eps),
        is_interleaved=config.interleaved_rotation,
    )
    return chosen_TK, key_pages


def choose_layer_blocks(
    normed_TD: jax.Array, key_pages: jax.Array, inputs: AttentionInputs, *, config: BlockIndexConfig
) -> tuple[jax.Array, jax.Array]:
    """Compute `block_index.choose_layer_blocks` with packed weights; the pool is updated in place.

    It rounds at the same places. Queries and scores are computed for tokens that do not see all blocks only.
    """
    weights, batch = inputs.weights, inputs.batch
    choice, num_positions = config.choice, batch.page_table_BP.shape[-1] * key_pages.shape[1]
    num_chosen = min(choice.top_k, -(-num_positions // choice.block_size))
    shapes = (
        jax.ShapeDtypeStruct((len(normed_TD), config.num_heads, num_chosen), jnp.int32),
        jax.ShapeDtypeStruct(key_pages.shape, key_pages.dtype),
    )
    call = jax.ffi.ffi_call(f"{PREFIX}blocks", shapes, input_output_aliases={13: 1})
    chosen_TAK, key_pages = call(
        normed_TD,
        *(weights[name] for name in (*BLOCK_MATRICES, "index_q_norm_Ld", "index_k_norm_Ld")),
        *_places(normed_TD, key_pages, inputs),
        key_pages,
        num_singles=np.int64(batch.num_singles),
        block_size=np.int64(choice.block_size),
        first_blocks=np.int64(choice.first_blocks),
        local_blocks=np.int64(choice.local_blocks),
        eps=np.float32(config.eps),
        is_interleaved=config.interleaved_rotation,
    )
    return chosen_TAK, key_pages


def _places(normed_TD: jax.Array, key_pages: jax.Array, inputs: AttentionInputs) -> tuple[jax.Array, ...]:
    """Return the shared arguments of both calls: tokens, page tables and the layer."""
    batch, first_page, num_pages = inputs.batch.of_layer(inputs.layer, key_pages, len(inputs.weights["index_k_LDd"]))
    of_tokens = (*inputs.rotation, batch.kv_slots_T, batch.positions_T)
    assert all(len(array) == len(normed_TD) for array in of_tokens), "each token has a position, a slot and its angles"
    of_layer = (jnp.asarray(number, jnp.int32) for number in (inputs.layer, first_page, num_pages))
    return *of_tokens, batch.page_table_BP, *of_layer
