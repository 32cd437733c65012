"""Choices of the index of sparse attention: passed from layer to layer, captured as rows, and forced."""

# T tokens   X tokens in prefill blocks   I index rows of a token   K chosen positions or blocks

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.model.layers.attention import BLOCKS, GroupedAttention
from rayserve_moe.model.layers.latent import SPARSE, LatentAttention
from rayserve_moe.model.model_config import StepInputs
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.requests.records import IndexLayout

STATE = "index_keys"
"""State with the keys of an index."""
CHOSEN = "chosen_tokens"
"""The choices of the last layer with an index, passed from layer to layer: int32 [T, K], ascending with -1 behind. They
are the positions that each token sees, or the blocks that it sees by each head of an index of blocks."""


def index_layout(spec: ModelSpec) -> IndexLayout | None:
    """Return the layout of a model's index rows; None for a model without an index.

    An index of blocks has a row for each of its heads, so `layer_ids` names a layer once per head.
    """
    for own in spec.mixers:
        layers = spec.layers_with_mixer(own.kind)
        if isinstance(own, LatentAttention) and own.index and own.kind == SPARSE:
            return IndexLayout(layers, own.index.top_k)
        if isinstance(own, GroupedAttention) and own.index and own.kind == BLOCKS:
            index = own.index
            layers = tuple(layer for layer in layers for _ in range(index.num_heads))
            return IndexLayout(layers, index.top_k, block_size=index.block_size)
    return None


def with_forced(chosen_TK: jax.Array, inputs: StepInputs, row: jax.Array) -> jax.Array:
    """Return a choice with the forced one of tokens in prefill blocks, which come last; `row` is an index row."""
    if inputs.chosen_IXK is None:
        return chosen_TK
    forced_XK = inputs.chosen_IXK[row][:, : chosen_TK.shape[1]]
    first = len(chosen_TK) - len(forced_XK)
    chosen_XK = jnp.where(forced_XK[:, :1] >= 0, forced_XK, chosen_TK[first:])
    return jnp.concatenate([chosen_TK[:first], chosen_XK])
