"""A TPU kernel for the experts of a device: each received row times its experts here, added up to one row.

A step of the grid computes a slot, while the weights of the next slot are read. Received rows and their sums lie in the
core's memory. A slot's rows are gathered into tiles there, multiplied, and added to the sums at once, so that a sum has
its experts in the order of slots, and no result is written to HBM by itself:

    | gather tile 0 | multiply | add to sums | gather tile 1 | ...     of slot 0, then of slot 1, ...
"""

# C rows that a device receives   Q words of a row / LANES   R ranks   A assignments of a sender   S local slots
# X layers * S   D model width   F expert width   M rows of a tile

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.activations import Activation, activate
from rayserve_moe.kernels.reference.device_sums import SlotLists
from rayserve_moe.kernels.reference.expert_products import ExpertWeights, LayerExperts
from rayserve_moe.kernels.tpu.device_rows import packed
from rayserve_moe.kernels.tpu.dispatch_rows import as_words, halves, rounded
from rayserve_moe.kernels.tpu.dispatch_sizes import LANES, SUBLANES

TILE_ROWS = 128
"""Rows that are multiplied at once: with fewer the matrix unit waits for weights."""
UNROLLED = 8
"""Rows that a trip of a loop copies or adds up, and assignments that it lists."""
SPARE_BYTES, MAX_BYTES = 6 << 20, 104 << 20
"""Memory of a core for a tile and values, and the maximum that the kernel uses."""
SCALAR_BYTES = 960 << 10
"""Maximum scalar memory of a core for lists; smaller tables and the compiler need the rest."""


def sum_experts(rows_CQV: jax.Array, lists: SlotLists, experts: LayerExperts, *, interpret: Any = False) -> jax.Array:
    """Return the sum of gate * expert of each received row over the local slots, in their order: words [C, Q, V]."""
    weights, config = experts.weights, experts.config
    (count, words, _), (_, width, inner) = rows_CQV.shape, weights.up_XDF.shape
    # The scalar unit addresses an array of one dimension in a single instruction.
    places, gates = (jnp.pad(a, ((0, 0), (0, UNROLLED))).reshape(-1) for a in (lists.places_RA, lists.gates_RA))
    first_1 = jnp.asarray(experts.first_slot, jnp.int32).reshape(1)
    smem, hbm = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.HBM))
    up = pl.BlockSpec((1, width, inner), lambda slot, first_1: (first_1[0] + slot, 0, 0))
    down = pl.BlockSpec((1, inner, width), lambda slot, first_1: (first_1[0] + slot, 0, 0))
    listed, held = count + TILE_ROWS + UNROLLED, (_whole_trips(count) + 1) * words
    sums = pl.pallas_call(
        partial(_kernel, activation=config.activation),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(config.num_slots,),
            in_specs=[smem, smem, smem, smem, hbm, up, up, down],
            out_specs=hbm,
            scratch_shapes=[
                pltpu.VMEM((held, LANES), jnp.uint32),
                pltpu.VMEM((held, LANES), jnp.float32),
                pltpu.VMEM((held, LANES), jnp.float32),
                pltpu.VMEM((TILE_ROWS * words, LANES), jnp.uint32),
                pltpu.SMEM((listed,), jnp.int32),
                pltpu.SMEM((listed,), jnp.float32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((count * words, LANES), jnp.uint32),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_bytes(count, width, inner), dimension_semantics=("arbitrary",)
        ),
        name="device_sums",
        interpret=interpret,
    )(
        first_1,
        lists.begin_RS,
        lists.base_R,
        places,
        gates,
        rows_CQV.reshape(-1, LANES),
        weights.gate_XDF,
        weights.up_XDF,
        weights.down_XFD,
    )
    return sums.reshape(rows_CQV.shape)


def vmem_bytes(num_rows: int, width: int, inner: int) -> int:
    """Return the bytes of its memory that a core takes: rows, sums in float32, and an expert twice."""
    return (_whole_trips(num_rows) + 1) * width * 6 + 2 * 3 * width * inner * 2 + SPARE_BYTES


def max_rows(width: int, inner: int, top_k: int) -> int:
    """Return the maximum number of rows that a device can receive, by both memories of a core."""
    by_vectors = (MAX_BYTES - vmem_bytes(0, width, inner)) // (width * 6)
    # Scalars are the place and the weight of every assignment, and those listed of a slot.
    by_scalars = SCALAR_BYTES // (8 * (top_k + 1))
    return max(0, min(by_vectors, by_scalars) // UNROLLED * UNROLLED)


def unsupported_reason(
    hidden_TD: jax.Array, weights: ExpertWeights, *, num_cores: int | None = None, core_bytes: int | None = None
) -> str:
    """Return why the kernels do not take tokens and weights; empty if they do.

    `num_cores` of a device and the bytes of a core's memory are those of this process's device if they are None.
    """
    _, width, inner = weights.up_XDF.shape
    if hidden_TD.dtype != jnp.bfloat16 or weights.up_XDF.dtype != jnp.bfloat16:
        return f"{hidden_TD.dtype} tokens or {weights.up_XDF.dtype} weights are not bfloat16"
    if weights.gate_XDF is None:
        return "experts have no gate"
    if weights.gate_bias_XF is not None:
        return "experts have biases"
    if width % (2 * LANES * SUBLANES) or inner % LANES:
        return f"an expert of {width} x {inner} is not whole tiles of {2 * LANES * SUBLANES} x {LANES}"
    if num_cores is None or core_bytes is None:
        chip = pltpu.get_tpu_info()
        num_cores, core_bytes = chip.num_cores, chip.vmem_capacity_bytes
    if num_cores > 1:
        return "the kernel runs on one core, and several share a device"
    if core_bytes < MAX_BYTES:
        return f"a core has {core_bytes >> 20} MiB of memory, not {MAX_BYTES >> 20}"
    return ""


def spare_row(num_rows: int) -> int:
    """Return the row that pads tiles: the last one, which no rank sends."""
    return num_rows - 1


def _whole_trips(num_rows: int) -> int:
    return -(-num_rows // UNROLLED) * UNROLLED


class Refs(NamedTuple):
    """Operands after the first slot of the weights, result and scratch of the kernel, in its order."""

    begin_RS: Any
    base_R: Any
    places: Any
    gates: Any
    """Fields of `SlotLists`; the last two have the assignments of all senders, and `UNROLLED` more for each."""
    rows_in: Any
    """Received rows as words, in HBM."""
    gate: Any
    up: Any
    down: Any
    """Weights of a slot."""
    sums_out: Any
    """Sums of rows as words, in HBM."""
    rows: Any
    """Received rows, and a spare row."""
    lower: Any
    upper: Any
    """Sums of the lower and the upper halves of rows, float32."""
    tile: Any
    """Rows of a tile, then their results."""
    listed: Any
    """Row of each assignment of a slot, sender after sender."""
    weights: Any
    """Weight of each listed assignment."""
    copied: Any
    """Semaphore of copies from and to HBM."""

    @property
    def words(self) -> int:
        return self.tile.shape[0] // TILE_ROWS

    @property
    def num_rows(self) -> jax.Array:
        return self.base_R[self.base_R.shape[0] - 1]

    @property
    def spare(self) -> int:
        return spare_row(self.rows.shape[0] // self.words)

    def at(self, row: jax.Array | int, number: int = 1) -> Any:
        """Return the words of `number` rows from a row on."""
        return pl.ds(pl.multiple_of(jnp.asarray(row * self.words), self.words), number * self.words)


def _kernel(*given: Any, activation: Activation) -> None:
    refs, slot = Refs(*given[1:]), pl.program_id(0)
    pl.when(slot == 0)(partial(_take_rows, refs))
    number = _list_rows(refs, slot)

    def multiply(i: jax.Array, _: None) -> None:
        first = i * TILE_ROWS
        _gather(refs, first)
        _multiply_tile(refs, activation)
        _add(refs, first, jnp.minimum(number - first, TILE_ROWS))

    jax.lax.fori_loop(0, pl.cdiv(number, TILE_ROWS), multiply, None)
    pl.when(slot == pl.num_programs(0) - 1)(partial(_give_sums, refs))


def _take_rows(refs: Refs) -> None:
    """Copy the received rows, and begin their sums with zeros."""
    copy = _copy_of(refs, refs.rows_in, refs.rows)
    pl.when(refs.num_rows > 0)(copy.start)
    for held in (refs.rows, refs.lower, refs.upper):
        held[refs.at(refs.spare), :] = jnp.zeros((refs.words, LANES), held.dtype)

    def clear(i: jax.Array, _: None) -> None:
        for sums in (refs.lower, refs.upper):
            sums[refs.at(i * UNROLLED, UNROLLED), :] = jnp.zeros((UNROLLED * refs.words, LANES), jnp.float32)

    jax.lax.fori_loop(0, pl.cdiv(refs.num_rows, UNROLLED), clear, None)
    pl.when(refs.num_rows > 0)(copy.wait)


def _copy_of(refs: Refs, source: Any, target: Any) -> Any:
    used = pl.ds(jnp.int32(0), refs.num_rows * refs.words)
    return pltpu.make_async_copy(source.at[used], target.at[used], refs.copied)


def _list_rows(refs: Refs, slot: jax.Array) -> jax.Array:
    """List the rows of a slot with their weights, and pad the list by a tile; return their number."""

    num_ranks = refs.begin_RS.shape[0]
    stride = refs.places.shape[0] // num_ranks

    def list_sender(rank: jax.Array, number: jax.Array) -> jax.Array:
        first, end, base = refs.begin_RS[rank, slot], refs.begin_RS[rank, slot + 1], refs.base_R[rank]

        def put(i: jax.Array, _: None) -> None:
            # Beyond the sender's last assignment the next sender, or the padding, takes the place.
            for k in range(UNROLLED):
                place, assignment = number + i * UNROLLED + k, rank * stride + first + i * UNROLLED + k
                refs.listed[place] = base + refs.places[assignment]
                refs.weights[place] = refs.gates[assignment]

        jax.lax.fori_loop(0, pl.cdiv(end - first, UNROLLED), put, None)
        return number + end - first

    number = jax.lax.fori_loop(0, num_ranks, list_sender, jnp.int32(0))

    def pad(i: jax.Array, _: None) -> None:
        for k in range(UNROLLED):
            refs.listed[number + i * UNROLLED + k] = refs.spare
            refs.weights[number + i * UNROLLED + k] = 0.0

    jax.lax.fori_loop(0, TILE_ROWS // UNROLLED, pad, None)
    return number


def _gather(refs: Refs, first: jax.Array) -> None:
    """Copy the rows of a tile together, from place `first` of the list on."""

    def gather(i: jax.Array, _: None) -> None:
        for k in range(UNROLLED):
            row = i * UNROLLED + k
            refs.tile[refs.at(row), :] = refs.rows[refs.at(refs.listed[first + row]), :]

    jax.lax.fori_loop(0, TILE_ROWS // UNROLLED, gather, None)


def _add(refs: Refs, first: jax.Array, number: jax.Array) -> None:
    """Add the weighted results of a tile to the sums of their rows."""

    def add(i: jax.Array, _: None) -> None:
        # A slot has a row once, so several rows may be read before any is written.
        numbers = [i * UNROLLED + k for k in range(UNROLLED)]
        own = [refs.at(refs.listed[first + row]) for row in numbers]
        before = [(refs.lower[place, :], refs.upper[place, :]) for place in own]
        for row, place, (lower, upper) in zip(numbers, own, before, strict=True):
            result, weight = halves(refs.tile[refs.at(row), :]), refs.weights[first + row]
            refs.lower[place, :], refs.upper[place, :] = lower + weight * result[0], upper + weight * result[1]

    jax.lax.fori_loop(0, pl.cdiv(number, UNROLLED), add, None)


def _give_sums(refs: Refs) -> None:
    """Round the sums, in the place of the rows, and copy them to HBM."""

    def pack(i: jax.Array, _: None) -> None:
        some = refs.at(i * UNROLLED, UNROLLED)
        refs.rows[some, :] = packed(refs.lower[some, :], refs.upper[some, :])

    jax.lax.fori_loop(0, pl.cdiv(refs.num_rows, UNROLLED), pack, None)
    copy = _copy_of(refs, refs.rows, refs.sums_out)
    pl.when(refs.num_rows > 0)(copy.start)
    pl.when(refs.num_rows > 0)(copy.wait)


def _multiply_tile(refs: Refs, activation: Activation) -> None:
    """Multiply the rows of a tile by an expert; the results, rounded to bfloat16, replace the rows."""
    tile, words = refs.tile, refs.words
    pieces = [pl.ds(q, TILE_ROWS, stride=words) for q in range(words)]
    parts = [halves(tile[piece, :]) for piece in pieces]
    columns = [lower for lower, _ in parts] + [upper for _, upper in parts]
    rows_MD = jnp.concatenate([column.astype(jnp.bfloat16) for column in columns], axis=1)

    def product(rows_MK: jax.Array, matrix_KN: jax.Array) -> jax.Array:
        return jnp.dot(rows_MK, matrix_KN, preferred_element_type=jnp.float32)

    gate_MF, up_MF = product(rows_MD, refs.gate[0]), product(rows_MD, refs.up[0])
    inner_MF = activate(gate_MF, up_MF, activation).astype(jnp.bfloat16)
    result_MD = rounded(product(inner_MF, refs.down[0]))
    words_MW = as_words(result_MD)
    for q, piece in enumerate(pieces):
        tile[piece, :] = words_MW[:, q * LANES : (q + 1) * LANES]
