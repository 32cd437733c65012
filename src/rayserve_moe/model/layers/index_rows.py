"""Choices of the index of sparse attention: passed from layer to layer, captured as rows, and forced."""

# T tokens   F forced tokens   I index rows of a token   K chosen positions or blocks

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.attention_layer import AttentionInputs
from rayserve_moe.model.layers.attention import BLOCKS, GroupedAttention
from rayserve_moe.model.layers.kinds import LayerInputs
from rayserve_moe.model.layers.latent import SHARED, SPARSE, LatentAttention
from rayserve_moe.model.model_config import Pools, StepInputs, adapters_of
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
            sparse = sorted((*layers, *spec.layers_with_mixer(SHARED)))
            return IndexLayout(layers, tuple(sparse), own.index.top_k)
        if isinstance(own, GroupedAttention) and own.index and own.kind == BLOCKS:
            index = own.index
            layers = tuple(layer for layer in layers for _ in range(index.num_heads))
            return IndexLayout(layers, layers, index.top_k, block_size=index.block_size)
    return None


def by_index(
    rows: tuple[jax.Array, Pools], inputs: LayerInputs, *, mixer: str, choose: Callable[..., tuple[jax.Array, ...]]
) -> tuple[jax.Array, Pools]:
    """Return the choice of a layer's index, int32 [T, ..., K], and the pools with the index keys of new tokens.

    `choose` is a kernel with its configuration, and `mixer` names the kind.
    """
    (normed_TD, pools), (weights, step, layer, _) = rows, inputs
    of_layer = AttentionInputs(weights, step.batch.of_state(STATE), step.prepared[mixer].rotation, layer)
    of_layer = of_layer._replace(adapters=adapters_of(step, mixer, layer))
    with jax.named_scope("index"):
        chosen, keys = choose(normed_TD, *pools[STATE], of_layer)
    return chosen, {**pools, STATE: (keys,)}


def with_forced(chosen_TK: jax.Array, step: StepInputs, row: jax.Array) -> jax.Array:
    """Return a choice with the forced one of some tokens in prefill blocks, which come behind single tokens.

    `row` is an index row.
    """
    if step.choices is None:
        return chosen_TK
    tokens_F, forced_IFK = step.choices
    forced_FK = forced_IFK[row][:, : chosen_TK.shape[1]]
    places_F = tokens_F + step.batch.num_singles
    is_forced = jnp.any(places_F < len(chosen_TK))
    return jax.lax.cond(is_forced, lambda: chosen_TK.at[places_F].set(forced_FK, mode="drop"), lambda: chosen_TK)
