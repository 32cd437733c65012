"""Experts of a device in one TPU kernel: gate (if any), up, activation and down of rows in the order of slots.

A step of the kernel's grid computes a slot, or a block of the expert width if an expert does not fit twice. While a
slot is multiplied, the weights of the next slot with rows are read; weights of slots without rows are never read. Rows
and results stay in the core's memory, so the kernel is for few rows, as in a decode step. Weights of 8 bits are
converted on their way into the matrix unit. Products are multiplied by the scales of columns; scales of blocks of rows
multiply the weights as they are converted. The adapters of a slot are read with its weights, and add to each product
what `adapters.grouped_products` adds.
"""

# T tokens   D model width   F expert width   B block of F   K experts per token   P assignments = T * K
# S local slots   X layers * S   R rows with padding   M rows of a tile   Z blocks of rows with scales of their own
# Q ranks of all resident adapters, one adapter after another   I inputs   O outputs

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.adapters import ExpertAdapters
from rayserve_moe.kernels.narrow_weights import SCALE_BLOCK, held_product, operand_of
from rayserve_moe.kernels.reference.activations import activate
from rayserve_moe.kernels.reference.expert_products import LayerExperts, ProductConfig
from rayserve_moe.kernels.slot_order import order_by_slot, take

BlockPlace = tuple[jax.Array | int, ...]
TILE_ROWS, ALIGNED_ROWS = 64, 16
"""Rows that are multiplied at once; a tile begins at a multiple of `ALIGNED_ROWS`."""
LANES = 128
WEIGHT_BYTES, SPARE_BYTES, MAX_BYTES = 24 << 20, 4 << 20, 60 << 20
"""Parts of a core's memory: for weights, for the values of a tile, and the maximum that the kernel uses."""


def multiply_grouped(
    hidden_TD: jax.Array, slots_TK: jax.Array, experts: LayerExperts, *, interpret: Any = False
) -> jax.Array:
    """Multiply as `multiply_by_ragged_dot`, for calls that `unsupported_reason` accepts: [T, K, D].

    `interpret` (see `pallas_call`) runs the kernel without a TPU.
    """
    weights, config = experts.weights, experts.config
    (_, width, inner), num_rows = weights.up_XDF.shape, _padded(slots_TK.size)
    block = inner_block(width, inner, weights.up_XDF.dtype.itemsize)
    token_P, place_P = order_by_slot(slots_TK, config.num_slots)
    rows_RD = take(hidden_TD, jnp.pad(token_P, (0, num_rows - token_P.size))).reshape(num_rows, -1)
    begin_S, held_S = _visits(slots_TK.reshape(-1), config.num_slots)
    first_1 = jnp.asarray(experts.first_slot, jnp.int32).reshape(1)
    multiply = _kernel_for(rows_RD, experts, block, vmem_bytes=_vmem_bytes(interpret), interpret=interpret)
    held = [array for array in weights if array is not None]
    if experts.adapters is not None:
        pairs = [*experts.adapters.experts.before(), experts.adapters.experts.down]
        held += [stack.reshape(len(stack), -1, stack.shape[-1]) for pair in pairs for stack in pair]
        slot_P = jnp.pad(take(experts.adapters.slot_T, token_P), (0, num_rows - token_P.size))
        held.append(slot_P[:, None])
    results_RD = multiply(first_1, begin_S, held_S, rows_RD, *held)
    results_R = take(results_RD.reshape(num_rows, *hidden_TD.shape[1:]), place_P)
    return results_R.reshape(*slots_TK.shape, *hidden_TD.shape[1:])


def unsupported_reason(
    hidden_TD: jax.Array, slots_TK: jax.Array, experts: LayerExperts, *, interpret: Any = False
) -> str:
    """Return why `multiply_grouped` does not take a call; empty if it does."""
    weights = experts.weights
    if weights.gate_bias_XF is not None:
        return "experts have biases"
    _, width, inner = weights.up_XDF.shape
    block = inner_block(width, inner, weights.up_XDF.dtype.itemsize)
    adapters = None if experts.adapters is None else experts.adapters.experts
    if adapters is not None and adapters.share_outer:
        return "rows carry ranks of adapters"
    if adapters is not None and block < inner:
        return "an expert with adapters does not fit twice as a whole"
    if not block:
        return f"no block of an expert of {width} x {inner} fits twice in {WEIGHT_BYTES >> 20} MiB"
    vmem_bytes = _vmem_bytes(interpret)
    if not vmem_bytes:
        return "the kernel runs on one core, and several share a device"
    # Rows and results are buffered twice; sums over parts of an expert are kept in float32.
    num_rows = _padded(math.prod(slots_TK.shape))
    row_bytes = num_rows * width * (4 * hidden_TD.dtype.itemsize + 4 * (block < inner))
    if adapters is not None:
        stacks = jax.tree.leaves(adapters)
        row_bytes += num_rows * 2 * LANES * 4 + sum(2 * math.prod(s.shape[1:]) * s.dtype.itemsize for s in stacks)
    if (num_bytes := WEIGHT_BYTES + row_bytes + SPARE_BYTES) > vmem_bytes:
        return f"{num_rows} rows take {num_bytes >> 20} of {vmem_bytes >> 20} MiB of a core's memory"
    return ""


def inner_block(width: int, inner: int, itemsize: int) -> int:
    """Return the maximum part of the expert width, in whole lanes that divide it, with three matrices that fit twice.

    0 if no part fits.
    """
    most = WEIGHT_BYTES // (3 * width * 2 * itemsize)
    fitting = (block for block in range(LANES, inner + 1, LANES) if inner % block == 0 and block <= most)
    return 0 if width % LANES else max(fitting, default=0)


def _vmem_bytes(interpret: Any) -> int:
    """Return the bytes of a core's memory that the kernel may use; 0 if several cores share a device."""
    if interpret:
        return MAX_BYTES
    chip = pltpu.get_tpu_info()
    return min(MAX_BYTES, chip.vmem_capacity_bytes * 3 // 4) if chip.num_cores == 1 else 0


def _padded(num_rows: int) -> int:
    """Return the rows with padding: a tile begins up to `ALIGNED_ROWS` rows before a slot's rows."""
    return -(-num_rows // ALIGNED_ROWS) * ALIGNED_ROWS + TILE_ROWS


def _visits(slots_P: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """Return the first row of each slot, and the slot of the weights in its step: int32 [S + 1] each.

    A slot with rows has its own weights, a slot without rows the weights of the next slot with rows. After the last
    slot with rows, number i, the second array holds 2 * S - i.
    """
    slots = np.arange(num_slots + 1, dtype=np.int32)[:, None]
    held = jnp.where(slots_P >= slots, slots_P, 2 * num_slots - slots_P)
    held = jnp.where(slots_P < num_slots, held, 2 * num_slots)
    return jnp.sum(slots_P < slots, axis=1, dtype=jnp.int32), jnp.min(held, axis=1)


def _kernel_for(
    rows_RD: jax.Array, experts: LayerExperts, block: int, *, vmem_bytes: int, interpret: Any
) -> Callable[..., jax.Array]:
    """Return the kernel for rows and experts of these shapes."""
    (num_rows, width), num_slots = rows_RD.shape, experts.config.num_slots
    weights = experts.weights
    num_blocks, has_gate = weights.up_XDF.shape[2] // block, weights.gate_XDF is not None

    def held_block(step: jax.Array, part: jax.Array, first_1: jax.Array, held_S: jax.Array) -> BlockPlace:
        """Return slot and block of a step's weights: a slot without rows has the next first or the last block."""
        held = held_S[step]
        is_ahead = held < num_slots
        slot = first_1[0] + jnp.where(is_ahead, held, 2 * num_slots - held)
        return slot, jnp.where(held == step, part, jnp.where(is_ahead, 0, num_blocks - 1))

    def of_up(step: jax.Array, part: jax.Array, first_1: jax.Array, _: jax.Array, held_S: jax.Array) -> BlockPlace:
        slot, block = held_block(step, part, first_1, held_S)
        return slot, 0, block

    def of_down(step: jax.Array, part: jax.Array, first_1: jax.Array, _: jax.Array, held_S: jax.Array) -> BlockPlace:
        slot, block = held_block(step, part, first_1, held_S)
        return slot, block, 0

    def of_whole(step: jax.Array, part: jax.Array, first_1: jax.Array, _: jax.Array, held_S: jax.Array) -> BlockPlace:
        return held_block(step, part, first_1, held_S)[0], 0, 0

    whole = pl.BlockSpec(memory_space=pltpu.VMEM)
    up = pl.BlockSpec((1, width, block), of_up)
    of_scales = ((block, of_up), (block, of_up), (width, of_whole))
    pairs = zip(weights[6:], of_scales, strict=True)
    scales = [pl.BlockSpec((1, s.shape[1], size), at) for s, (size, at) in pairs if s is not None]
    of_adapters = [] if experts.adapters is None else _adapter_specs(experts.adapters.experts, of_whole)
    ranks = 0 if experts.adapters is None else experts.adapters.experts.up.a_LSRI.shape[2]
    multiply_slot = partial(
        _multiply_slot, has_gate=has_gate, has_scales=bool(scales), ranks=ranks, config=experts.config
    )
    sums = pltpu.VMEM((num_rows if num_blocks > 1 else ALIGNED_ROWS, width), jnp.float32)
    return pl.pallas_call(
        partial(multiply_slot, num_blocks=num_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_slots, num_blocks),
            in_specs=[whole, *[up] * (1 + has_gate), pl.BlockSpec((1, block, width), of_down), *scales, *of_adapters],
            out_specs=whole,
            scratch_shapes=[sums],
        ),
        out_shape=jax.ShapeDtypeStruct(rows_RD.shape, rows_RD.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes),
        name="grouped_ffn",
        interpret=interpret,
    )


def _adapter_specs(adapters: ExpertAdapters, of_whole: Callable[..., BlockPlace]) -> list[pl.BlockSpec]:
    """Return the blocks of the adapters of a slot, and of the adapter of each row."""
    shapes = [(1, s.shape[1] * s.shape[2], s.shape[3]) for pair in (*adapters.before(), adapters.down) for s in pair]
    return [*(pl.BlockSpec(shape, of_whole) for shape in shapes), pl.BlockSpec(memory_space=pltpu.VMEM)]


def _multiply_slot(
    *refs: Any, num_blocks: int, has_gate: bool, has_scales: bool, ranks: int, config: ProductConfig
) -> None:
    """Multiply the tiles of a slot's rows with a block of the expert width; rows of other slots do not change.

    `ranks` is the rank of the adapters, 0 without any.
    """
    _, begin_S, _, rows_ref, *others = refs
    *held, out_ref, sum_ref = others
    *gate_refs, up_ref, down_ref = held[: 2 + has_gate]
    rest = held[2 + has_gate :]
    *gate_scales, up_scale, down_scale = [ref.at[0] for ref in rest[: 2 + has_gate]] if has_scales else [None] * 3
    *adapter_refs, row_slots_ref = rest[(2 + has_gate) * has_scales :] if ranks else [None]
    slot, part = pl.program_id(0), pl.program_id(1)
    begin, end = begin_S[slot], begin_S[slot + 1]
    first = jax.lax.div(begin, ALIGNED_ROWS) * ALIGNED_ROWS

    def multiply_tile(i: jax.Array, carry: None) -> None:
        at = pl.multiple_of(first + i * TILE_ROWS, ALIGNED_ROWS)
        tile = pl.ds(at, TILE_ROWS)
        rows_MD = rows_ref[tile, :]

        def add(sum_MO: jax.Array, rows_MI: jax.Array, place: int) -> jax.Array:
            """Add the adapters of product `place`: 0 for gate or up, whichever is first."""
            if not ranks:
                return sum_MO
            a_ref, b_ref = adapter_refs[2 * place : 2 * place + 2]
            return sum_MO + _own_products(rows_MI, a_ref[0], b_ref[0], slot_M1=row_slots_ref[tile, :], ranks=ranks)

        operand = operand_of(rows_MD, narrows_rows=config.narrows_rows)
        gate_MB = add(held_product(operand, gate_refs[0][0], gate_scales[0]), rows_MD, 0) if has_gate else None
        up_MB = add(held_product(operand, up_ref[0], up_scale), rows_MD, int(has_gate))
        inner_MB = activate(gate_MB, up_MB, config.activation).astype(rows_MD.dtype)
        first_block = part * (down_ref.shape[1] // SCALE_BLOCK)
        operand = operand_of(inner_MB, narrows_rows=config.narrows_rows)
        sum_MD = held_product(operand, down_ref[0], down_scale, first=first_block)
        sum_MD = add(sum_MD, inner_MB, 1 + has_gate)
        place_M1 = at + jax.lax.broadcasted_iota(jnp.int32, (TILE_ROWS, 1), 0)
        is_own_M1 = (place_M1 >= begin) & (place_M1 < end)
        if num_blocks > 1:
            before_MD = sum_ref[tile, :]
            sum_MD = jnp.where(is_own_M1, sum_MD + jnp.where(part == 0, 0.0, before_MD), before_MD)
            sum_ref[tile, :] = sum_MD
        out_ref[tile, :] = jnp.where(is_own_M1, sum_MD.astype(out_ref.dtype), out_ref[tile, :])

    @pl.when(end > begin)
    def _() -> None:
        jax.lax.fori_loop(0, pl.cdiv(end - first, TILE_ROWS), multiply_tile, None)


def _own_products(rows_MI: jax.Array, a_QI: jax.Array, b_QO: jax.Array, *, slot_M1: jax.Array, ranks: int) -> jax.Array:
    """Return s B (A x) of each row's own adapter, and zeros of rows without one, float32 [M, O]."""
    by_inputs = (((1,), (1,)), ((), ()))
    all_MQ = jax.lax.dot_general(rows_MI, a_QI, by_inputs, preferred_element_type=jnp.float32)
    rank_MQ = jax.lax.broadcasted_iota(jnp.int32, all_MQ.shape, 1)
    is_own_MQ = (rank_MQ >= slot_M1 * ranks) & (rank_MQ < (slot_M1 + 1) * ranks)
    own_MQ = jnp.where(is_own_MQ, all_MQ, 0.0).astype(rows_MI.dtype)
    return jnp.dot(own_MQ, b_QO, preferred_element_type=jnp.float32)
