"""A sequence through one layer of latent attention, chunk by chunk, by the kernels of any table that has it."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.adapters import AdapterPair, LayerAdapters, TokenAdapters
from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference.attention import KEYS_PER_SPAN
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import KERNELS, LATENT_ATTENTION
from rayserve_moe.model.layers.paged import query_scales
from rayserve_moe.model.spec import QueryScaleSpec
from tests.unit.kernels.latent_cases import LatentModel, Weights

SLOT = 2
PAGE, BLOCK, LAYER, THETA, LENGTH = 16, 8, 1, 100.0, KEYS_PER_SPAN + 21
PAGES = np.random.default_rng(3).permutation(np.arange(1, 1 + -(-LENGTH // PAGE))).astype(np.int32)
NUM_PAGES = len(PAGES) + 3
Chunks = list[int]
"""Lengths of the chunks of a sequence, one per step; those of one token are single tokens."""
CUTS: dict[str, Chunks] = {
    "one prompt": [LENGTH],
    "a prompt, then decoding": [LENGTH - 5, *[1] * 5],
    "chunks that end within blocks and pages": [3, 41, 30, 60, LENGTH - 134],
}


@cache
def compiled(model: LatentModel, kernels: str):
    config = LatentConfig(model.nope, model.norm_eps, model.scale, model.interleaved)
    frequencies = (THETA ** (-np.arange(0, model.rope, 2) / model.rope)).astype(np.float32)

    def layer(
        hidden: jax.Array,
        weights: dict[str, jax.Array],
        pool: jax.Array,
        batch: TokenBatch,
        pairs: dict[str, AdapterPair],
    ):
        rotation = rotation_of(batch.positions_T, frequencies)
        factors = None if model.query_scale is None else query_scales(batch, QueryScaleSpec(*model.query_scale))
        inputs = AttentionInputs(weights, batch, rotation, jnp.int32(LAYER), query_scale_T=factors)
        if pairs:
            tokens = TokenAdapters(jnp.array([SLOT], jnp.int32), jnp.zeros(len(hidden), jnp.int32))
            inputs = inputs._replace(adapters=LayerAdapters(pairs, inputs.layer, tokens))
        return LATENT_ATTENTION[kernels][0].run.attend(hidden, pool, inputs, config=config)

    return jax.jit(layer)


def batch_of(first: int, count: int) -> tuple[TokenBatch, slice]:
    """The next tokens of the sequence, as a single token or as blocks of a step that has both, and their places."""
    num_blocks = -(-LENGTH // BLOCK)
    places = slice(0, 1) if count == 1 else slice(1, 1 + count)
    positions = np.full(1 + num_blocks * BLOCK, -1, np.int32)
    positions[places] = np.arange(first, first + count)
    slots = np.where(positions >= 0, PAGES[positions // PAGE] * PAGE + positions % PAGE, 0).astype(np.int32)
    return TokenBatch(
        np.zeros_like(slots), positions, slots, np.tile(PAGES, (1 + num_blocks, 1)), num_singles=1
    ), places


def run(
    model: LatentModel,
    weights: Weights,
    hidden: np.ndarray,
    chunks: Chunks,
    *,
    dtype=jnp.float32,
    pool_dtype=None,
    kernels: str = "cpu",
    pairs: dict[str, AdapterPair] | None = None,
) -> tuple[np.ndarray, jax.Array]:
    """Return the outputs of all tokens [T, D], computed chunk by chunk, and the pool, NaN in unwritten rows.

    With `pairs` all tokens have the adapter in `SLOT`.
    """
    width = model.kv_lora + model.rope
    pool = jnp.full((model.num_layers * NUM_PAGES, PAGE, 1, width), jnp.nan, pool_dtype or dtype)
    arrays, outputs, first = {name: jnp.asarray(array, dtype) for name, array in weights.items()}, [], 0
    layouts = KERNELS[kernels].parameters.layouts
    arrays = {name: jnp.asarray(LAYOUTS[layouts.get(name, "")](np.asarray(array))) for name, array in arrays.items()}
    for count in chunks:
        batch, places = batch_of(first, count)
        rows = np.zeros((len(batch.positions_T), model.hidden), np.float32)
        rows[places] = hidden[first : first + count]
        out, pool = compiled(model, kernels)(jnp.asarray(rows, dtype), arrays, pool, batch, pairs or {})
        assert out.dtype == jnp.float32
        outputs.append(np.asarray(out)[places])
        first += count
    return np.concatenate(outputs), pool


def drawn(model: LatentModel) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((LENGTH, model.hidden)).astype(np.float32)
