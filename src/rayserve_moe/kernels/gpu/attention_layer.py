"""Grouped-query attention of a layer on GPUs: as `attention_layer.attend_layer`, with fewer and larger kernels."""

# T tokens   D model width   H local query heads   h head width   v value width

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels import attention_layer as reference
from rayserve_moe.kernels.adapters import LayerAdapters, with_adapters
from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_heads import StackedWeights, project_rows
from rayserve_moe.kernels.attention_layer import (
    AttentionInputs,
    PagedAttention,
    PagedKernels,
    PagedStep,
    attend_blocks,
    attend_by_window,
    gated,
)
from rayserve_moe.kernels.candidates import Operation
from rayserve_moe.kernels.reference.attention import ScoreConfig


def attend_layer(  # noqa: PLR0913 (kernels, by keyword)
    normed_TD: jax.Array,
    kv_pages: jax.Array,
    inputs: AttentionInputs,
    *,
    config: AttentionConfig,
    attend: PagedAttention,
    project_and_write: Operation,
    products: Operation,
) -> tuple[jax.Array, jax.Array]:
    """Return the float32 output product [T, D], a partial sum over devices, and the pool with new keys and values.

    `attend` attends single tokens and prefill blocks. Where `project_and_write` does not take the call, the layer is
    the reference's with this attention. `products` multiplies tokens with a layer of stacked matrices.
    """
    weights, layer = inputs.weights, inputs.layer
    batch, first_page, _ = inputs.batch.of_layer(layer, kv_pages, len(weights["q_LDH"]))
    of_layer = {name: stacked[layer] for name, stacked in weights.items()}
    stacked = StackedWeights(weights, layer)
    adapters = inputs.adapters
    choice = project_and_write.choose(normed_TD, of_layer, kv_pages, rotation=inputs.rotation, config=config)
    if choice.candidate is None:
        return reference.attend_layer(
            normed_TD, kv_pages, inputs, config=config, decode=attend, prefill=attend, project=project_rows
        )
    with jax.named_scope("projections"):
        queries_THh, kv_pages = choice.candidate.run(
            normed_TD,
            of_layer,
            kv_pages,
            slots_T=batch.kv_slots_T + first_page * kv_pages.shape[1],
            rotation=inputs.rotation,
            config=config,
            stacked=stacked,
            products=products,
            adapters=adapters,
        )
    step = PagedStep(batch, first_page, queries_THh, num_late=0, chosen_TK=inputs.chosen_TK)

    def attend_as(scores: ScoreConfig) -> tuple[jax.Array, jax.Array]:
        kernels = PagedKernels(attend, attend).with_knobs(config=scores, value_width=config.value_dim)
        if inputs.chosen_TK is not None:
            kernels = kernels.with_knobs(block_size=config.block_size)
        if "sinks_LA" in of_layer:
            kernels = kernels.with_knobs(sinks_H=of_layer["sinks_LA"])
        return attend_blocks(queries_THh, kv_pages, step, kernels=kernels)

    with jax.named_scope("paged_attention"):
        attended_THv, kv_pages = attend_by_window(attend_as, layer, config)
    with jax.named_scope("output_product"):
        gate = partial(gated, function=config.output_gate, adapters=adapters)
        attended_TH = gate(attended_THv, normed_TD, of_layer).reshape(len(normed_TD), -1)
        return _output(attended_TH, stacked, of_layer, products=products, adapters=adapters), kv_pages


def _output(
    attended_TH: jax.Array,
    stacked: StackedWeights,
    of_layer: Mapping[str, jax.Array],
    *,
    products: Operation,
    adapters: LayerAdapters | None,
) -> jax.Array:
    """Return the product with a layer's output matrix, with adapters if any, float32 [T, D]."""
    if adapters is None:
        return products(attended_TH, [stacked.of_layers["o_LHD"]], stacked.layer)
    return with_adapters(
        jnp.matmul(attended_TH, of_layer["o_LHD"], preferred_element_type=jnp.float32),
        attended_TH,
        "o_LHD",
        adapters=adapters,
    )
