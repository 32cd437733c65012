"""Expert products on a device, for assignments to the experts that it holds.

Experts of all layers lie in a flat [layers * slots, ...] array, and a `LayerExperts` holds the first slot of a layer,
so that no layer's weights are copied out of it. An assignment to an expert of another device has slot `num_slots` or
beyond, and its result is undefined: the sum leaves it out. Tokens are [T, D] or with D cut into parts, [T, Q, D / Q],
and results have the same form.
"""

# T tokens   D model width   F expert width   K experts per token   P assignments = T * K   S local slots   X layers * S
# Z blocks of rows of a matrix that have scales of their own

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.adapters import (
    AdapterPair,
    ExpertAdapters,
    RowAdapters,
    carried_products,
    expert_product,
    grouped_products,
    pair_of_layer,
    ranks_to_carry,
)
from rayserve_moe.kernels.narrow_weights import NARROW, dequantized, in_blocks, operand_of
from rayserve_moe.kernels.reference.activations import SILU, Activation, activate
from rayserve_moe.kernels.row_blocks import ByRows, at_once
from rayserve_moe.kernels.slot_order import inverse, order_by_slot, take


class ExpertWeights(NamedTuple):
    """Flat weights of all layers on this device: gate and up [X, D, F], down [X, F, D], and their biases if any.

    The gate is None for an activation without one.

    Matrices in 8 bits have float32 scales of their columns, [X, 1, F] and [X, 1, D]: products are multiplied by them.
    With more rows, [X, Z, F], they belong to blocks of rows, which are scaled ahead (`narrow_weights`).
    """

    gate_XDF: jax.Array | None
    up_XDF: jax.Array
    down_XFD: jax.Array
    gate_bias_XF: jax.Array | None = None
    up_bias_XF: jax.Array | None = None
    down_bias_XD: jax.Array | None = None
    gate_scale_XZF: jax.Array | None = None
    up_scale_XZF: jax.Array | None = None
    down_scale_XZD: jax.Array | None = None


Multiply = Callable[..., jax.Array]
"""The signature of `multiply_in_blocks`."""

TILE_ROWS = 256


@dataclass(frozen=True)
class ProductConfig:
    """Constants of a grouped product: local slots of a layer, and the activation.

    `mean_rows` is the number of assignments of an expert under even routing.
    """

    num_slots: int
    mean_rows: float
    activation: Activation = SILU
    narrows_rows: bool = False
    """True if rows are rounded to e4m3 for products with experts in e4m3 (`narrow_weights.quantized_rows`)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerExperts:
    """The experts of a layer on this device: the first of its slots in the flat weights of all layers."""

    weights: ExpertWeights
    first_slot: jax.Array | int
    config: ProductConfig = field(metadata={"static": True})
    adapters: RowAdapters | None = None
    """Adapters of the rows of a call; None: no row has one."""

    def with_rows(self, adapter_T: jax.Array | None) -> LayerExperts:
        """Return the experts for other rows, given their adapters."""
        if self.adapters is None or adapter_T is None:
            return self
        return replace(self, adapters=self.adapters._replace(slot_T=adapter_T))


def multiply_in_blocks(
    hidden_TD: jax.Array, slots_TK: jax.Array, experts: LayerExperts, *, block_rows: int = 0
) -> jax.Array:
    """Multiply block by block, each block of rows with its expert: the fast way on XLA:CPU.

    The product sits inside a `cond`: outside of it, XLA:CPU converts all bfloat16 experts to float32 ahead of the
    loop. Returns [T, K, D] in the tokens' dtype. The number of rows in a block is `block_rows`, or follows from shapes,
    never from a placement: a row's product does not depend on the place of its expert.
    """
    weights, config = experts.weights, experts.config
    (num_tokens, top_k), num_slots = slots_TK.shape, config.num_slots
    block = block_rows or _block_rows(config.mean_rows)
    slots_P, counts_S = _count_assignments(slots_TK, num_slots)
    order_P = jnp.argsort(slots_P, stable=True)
    last_block_S = jnp.cumsum((counts_S + block - 1) // block)
    first_block_S = last_block_S - (counts_S + block - 1) // block
    first_assignment_S = jnp.cumsum(counts_S) - counts_S
    num_blocks = last_block_S[-1]
    max_blocks = slots_P.size // block + min(num_slots, slots_P.size)

    def multiply(i: jax.Array) -> jax.Array:
        slot = jnp.searchsorted(last_block_S, i, side="right").astype(jnp.int32)
        assignments = first_assignment_S[slot] + (i - first_block_S[slot]) * block + jnp.arange(block)
        tokens = order_P.at[assignments].get(mode="clip") // top_k
        rows_BD, adapters = hidden_TD[tokens].reshape(block, -1), experts.adapters
        if adapters is not None:
            adapters = adapters._replace(slot_T=adapters.slot_T[tokens])
        return _expert(rows_BD, weights, experts.first_slot + slot, config, adapters=adapters)

    def visit(i: jax.Array, results_YD: jax.Array) -> jax.Array:
        rows_BD = jax.lax.cond(i < num_blocks, multiply, lambda _: jnp.zeros_like(results_YD[:block]), i)
        return jax.lax.dynamic_update_slice(results_YD, rows_BD, (i * block, 0))

    empty = jnp.zeros((max_blocks * block, weights.up_XDF.shape[1]), hidden_TD.dtype)
    results_YD = jax.lax.fori_loop(0, num_blocks, visit, empty)
    rank_in_slot_P = inverse(order_P) - first_assignment_S.at[slots_P].get(mode="clip")
    place_P = first_block_S.at[slots_P].get(mode="clip") * block + rank_in_slot_P
    results_PD = results_YD.at[jnp.where(slots_P < num_slots, place_P, 0)].get(mode="clip")
    return results_PD.reshape(num_tokens, top_k, *hidden_TD.shape[1:])


def multiply_by_ragged_dot(hidden_TD: jax.Array, slots_TK: jax.Array, experts: LayerExperts) -> jax.Array:
    """Multiply by `ragged_dot`, which TPUs lower to a grouped matmul that reads each weight once.

    Group sizes are zero but for this layer's slots. Returns [T, K, D] as `multiply_in_blocks` does. Tokens may carry
    ranks of their adapters beside their D columns (`carry_ranks`); results then do so too (`ranks_to_carry`).
    """
    experts = widened(experts, hidden_TD.dtype)
    weights, first_slot, adapters = experts.weights, experts.first_slot, experts.adapters
    num_tokens, top_k = slots_TK.shape
    num_slots, num_rows = experts.config.num_slots, product_rows(slots_TK.size)
    slots_P, counts_S = _count_assignments(slots_TK, num_slots)
    token_P, place_P = order_by_slot(slots_TK, num_slots)
    is_slot_XS = np.arange(len(weights.up_XDF))[:, None] == first_slot + np.arange(num_slots)
    sizes_X = jnp.sum(jnp.where(is_slot_XS, counts_S, 0), axis=1)
    token_of_row = jnp.pad(token_P, (0, num_rows - slots_P.size))
    sorted_PY = take(hidden_TD, token_of_row).reshape(num_rows, -1)
    sorted_PD, carried_PC = jnp.split(sorted_PY, [weights.up_XDF.shape[1]], axis=1)
    slot_of_row = first_slot + jnp.pad(jnp.sort(slots_P), (0, num_rows - slots_P.size))

    def multiply(rows: jax.Array, *products: _Product, carried: jax.Array | None = None) -> list[jax.Array]:
        made = [multiply_base(rows, product) for product in products]
        if adapters is None:
            return made
        pairs = [of_layer(product.adapters) for product in products if product.adapters is not None]
        add, operand = (grouped_products, rows) if carried is None else (carried_products, carried)
        added = add(operand, pairs, counts_S, slot_T=adapters.slot_T[token_of_row])
        return [out + more for out, more in zip(made, added, strict=True)]

    def multiply_base(rows: jax.Array, product: _Product) -> jax.Array:
        operand, row_scales = operand_of(rows, narrows_rows=experts.config.narrows_rows)
        operand = operand.astype(rows.dtype)
        out = jax.lax.ragged_dot(operand, product.matrices, sizes_X, preferred_element_type=jnp.float32)
        out = out if row_scales is None else out * row_scales
        if product.scales is not None:
            out = out * take_scales(product.scales, slot_of_row)
        return out if product.bias is None else out + product.bias.at[slot_of_row].get(mode="clip")

    def of_layer(pair: AdapterPair) -> AdapterPair:
        return pair_of_layer(pair, first_slot, num_slots)

    before, of_down = _products(weights, adapters)
    carried = carried_PC if carried_PC.shape[1] else None
    inner = _activated(multiply(sorted_PD, *before, carried=carried), experts.config.activation).astype(hidden_TD.dtype)
    if carried is None or adapters is None or of_down.adapters is None:
        (down,) = multiply(inner, of_down)
    else:
        pair, slot_T = of_layer(of_down.adapters), adapters.slot_T[token_of_row]
        ranks = ranks_to_carry(inner, pair, counts_S, slot_T=slot_T, num_columns=carried.shape[1])
        down = jnp.concatenate([multiply_base(inner, of_down), ranks], axis=1)
    rows_P = down.astype(hidden_TD.dtype).reshape(num_rows, *hidden_TD.shape[1:])
    return take(rows_P, place_P).reshape(num_tokens, top_k, *hidden_TD.shape[1:])


def take_scales(scales_X1F: jax.Array, slots_N: jax.Array) -> jax.Array:
    """Return the scales of each row's slot, float32 [N, F]; zeros without a slot.

    This is a product with rows of zeros and a single 1, which takes TPUs a fraction of the time of a gather. It is
    exact: three bfloat16 numbers make up a float32 one.
    """
    parts, rest_XF = [], scales_X1F[:, 0]
    for _ in range(3):
        # Not by converting to and fro, which compilers leave out.
        part_XF = jax.lax.reduce_precision(rest_XF, exponent_bits=8, mantissa_bits=7)
        parts.append(part_XF.astype(jnp.bfloat16))
        rest_XF = rest_XF - part_XF
    is_slot_NY = slots_N[:, None] == np.tile(np.arange(len(scales_X1F), dtype=np.int32), len(parts))
    return jnp.dot(is_slot_NY.astype(jnp.bfloat16), jnp.concatenate(parts), preferred_element_type=jnp.float32)


def sum_results(
    hidden_TD: jax.Array,
    slots_TK: jax.Array,
    gates_TK: jax.Array,
    experts: LayerExperts,
    *,
    multiply: Multiply,
    by_rows: ByRows = at_once,
) -> jax.Array:
    """Return the sum of each token's results times its gates: float32 [T, D]. Slots of other devices add nothing."""
    results_TKD = multiply(hidden_TD, slots_TK, experts)
    is_here_TK1 = (slots_TK < experts.config.num_slots)[..., None]
    results_TKD = jnp.where(is_here_TK1, results_TKD, 0).astype(jnp.float32)
    return by_rows(_weighted, (gates_TK, results_TKD))


def _weighted(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
    return jnp.einsum("TK,TKD->TD", *rows, precision=jax.lax.Precision.HIGHEST)


def widened(experts: LayerExperts, dtype: jnp.dtype) -> LayerExperts:
    """Return the experts of a layer with matrices of 8 bits converted, in a copy; others are not changed.

    Matrices with scales of blocks are scaled as well, and have no scales then.
    """
    first, size = experts.first_slot, experts.config.num_slots
    if experts.weights.up_XDF.dtype not in NARROW:
        return experts

    def of_layer(arrays: Any) -> Any:
        return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, first, size), arrays)

    own, adapters = of_layer(experts.weights), experts.adapters
    if adapters is not None:
        pairs = (None if pair is None else pair_of_layer(pair, first, size) for pair in adapters.experts)
        adapters = adapters._replace(experts=ExpertAdapters._make(pairs))
    scales = own[6:]
    if in_blocks(own.up_scale_XZF):
        pairs = zip(own[:3], scales, strict=True)
        matrices = (None if matrix is None else dequantized(matrix, scale, dtype) for matrix, scale in pairs)
        weights = ExpertWeights._make([*matrices, *own[3:6], None, None, None])
    else:
        matrices = (None if matrix is None else matrix.astype(dtype) for matrix in own[:3])
        weights = ExpertWeights._make([*matrices, *own[3:]])
    return LayerExperts(weights, 0, experts.config, adapters)


def product_rows(num_rows: int) -> int:
    """Return the rows of a `ragged_dot` for `num_rows`: a power of two up to `TILE_ROWS`, then a multiple of it.

    The height of a tile on TPUs is the largest power of two that divides the rows, up to `TILE_ROWS`. Below 8 they have
    no grouped product and multiply every row with every expert.
    """
    return max(8, 1 << (num_rows - 1).bit_length()) if num_rows <= TILE_ROWS else -(-num_rows // TILE_ROWS) * TILE_ROWS


def _count_assignments(slots_TK: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """Return the slot of each assignment [P] (`num_slots`: elsewhere), and the number of assignments per slot [S]."""
    slots_P = jnp.minimum(slots_TK.reshape(-1), num_slots)
    return slots_P, jnp.sum(slots_P[:, None] == jnp.arange(num_slots), axis=0, dtype=jnp.int32)


def _expert(
    rows_BD: jax.Array,
    weights: ExpertWeights,
    index: jax.Array,
    config: ProductConfig,
    *,
    adapters: RowAdapters | None,
) -> jax.Array:
    def multiply(rows: jax.Array, product: _Product) -> jax.Array:
        matrix, scales = product.matrices[index], None if product.scales is None else product.scales[index]
        operand, row_scales = operand_of(rows, narrows_rows=config.narrows_rows)
        dtype = rows.dtype if row_scales is None else jnp.float32
        if scales is not None and in_blocks(scales):
            matrix, scales = dequantized(matrix, scales, dtype), None
        out = jnp.matmul(operand.astype(dtype), matrix.astype(dtype), preferred_element_type=jnp.float32)
        out = out if row_scales is None else out * row_scales
        out = out if scales is None else out * scales
        out = out if product.bias is None else out + product.bias[index]
        if product.adapters is None or adapters is None:
            return out
        return out + expert_product(rows, product.adapters, index, slot_T=adapters.slot_T)

    before, down = _products(weights, adapters)
    inner = _activated([multiply(rows_BD, product) for product in before], config.activation)
    return multiply(inner.astype(rows_BD.dtype), down).astype(rows_BD.dtype)


class _Product(NamedTuple):
    """A product with matrices of all slots: rows * matrix * scales + bias, and adapters of rows."""

    matrices: jax.Array
    scales: jax.Array | None
    bias: jax.Array | None
    adapters: AdapterPair | None


def _products(weights: ExpertWeights, adapters: RowAdapters | None) -> tuple[list[_Product], _Product]:
    """Return the products ahead of the activation, [gate, up] or [up] without a gate, and the product of down."""
    gate, up, down = (None, None, None) if adapters is None else adapters.experts
    before = [_Product(weights.up_XDF, weights.up_scale_XZF, weights.up_bias_XF, up)]
    if weights.gate_XDF is not None:
        before.insert(0, _Product(weights.gate_XDF, weights.gate_scale_XZF, weights.gate_bias_XF, gate))
    return before, _Product(weights.down_XFD, weights.down_scale_XZD, weights.down_bias_XD, down)


def _activated(made: list[jax.Array], activation: Activation) -> jax.Array:
    """Return the operand of down from the results of the products ahead of the activation."""
    return activate(made[0] if len(made) == 2 else None, made[-1], activation)


def _block_rows(mean: float) -> int:
    """Return the rows per block, somewhat above the `mean` load of a slot, so that a block often suffices: 4 to 192.

    Each block reads its expert's weights again, larger products run closer to the machine's peak, and unused rows of
    a block are computed all the same. Loads of evenly routed experts scatter by about the root of their mean.
    """
    if mean <= 12:
        return max(4, 1 << (math.ceil(1.25 * mean) - 1).bit_length())
    return min(192, -(-math.ceil(mean + 1.5 * math.sqrt(mean)) // 16) * 16)
