"""Sizes of a call of the kernel `low_latency_dispatch`, the reason against unsuitable sizes, and the scratch arrays."""

# T tokens   D model width   F expert width   K experts per token   N assignments = T * K   S local slots
# X layers * S   H halves of a buffer = 2   R rows of a group

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.narrow_weights import NARROW, scale_rows
from rayserve_moe.kernels.reference.activations import SILU, Activation

LANES, SUBLANES = 128, 8
TILE_ROWS, CONVERTED_TOKENS = 64, 16
"""Rows that are multiplied at once; tokens that are converted at once."""
WEIGHT_DTYPES = ("bfloat16", *NARROW)
"""Dtypes of weights; weights of 8 bits have scales."""
GROUP_ROWS = 4 * TILE_ROWS
"""Rows of a slot for which the blocks of a large expert are read once."""
SCALAR_BYTES = (1 << 20) - (8 << 10)
"""Maximum scalar memory of a core for tables of the kernel; the compiler needs the rest."""
WEIGHT_BYTES, SPARE_BYTES, MAX_BYTES = 24 << 20, 8 << 20, 96 << 20
"""Parts of the core's memory: for weights, for values, and the maximum that the kernel uses."""


@dataclass(frozen=True)
class DispatchSizes:
    """Sizes of a call."""

    num_tokens: int
    """Tokens of a device."""
    top_k: int
    """Experts of a token."""
    width: int
    """Width of the model."""
    inner: int
    """Width of an expert."""
    num_slots: int
    """Slots of a rank."""
    axes: tuple[tuple[str, int], ...]
    """Names and sizes of the mesh axes of the ranks, the fastest axis last."""
    activation: Activation = SILU
    weight_dtype: str = "bfloat16"
    num_cores: int = 1
    """Cores of a device; each has a part of the slots."""
    given_block: int = 0
    """Replaces `widest_block`; 0: it does not."""
    adds_by_device: bool = False
    """True if a token's results are added up as `device_sums` adds them: in the order of slots, and rounded for each
    device; else in router order."""
    in_blocks: bool = False
    """True if matrices of 8 bits have scales of blocks of rows instead of columns."""
    narrows_rows: bool = False
    """True if rows are rounded to e4m3 for a product of two operands of 8 bits (`narrow_weights`)."""

    @property
    def of_core(self) -> DispatchSizes:
        """Return the sizes of a core; if slots do not divide, the last core has a slot without rows."""
        return replace(self, num_slots=-(-self.num_slots // self.num_cores), num_cores=1)

    @property
    def block(self) -> int:
        """Return the part of the expert width that is read at once: all, or as much as fits twice; 0: none fits."""
        return self.given_block or widest_block(self.width, self.inner, jnp.dtype(self.weight_dtype).itemsize)

    @property
    def is_streamed(self) -> bool:
        """Return True if experts are read in blocks; the rows of this device's slots then wait in HBM."""
        return self.block < self.inner

    @property
    def num_blocks(self) -> int:
        return self.inner // self.block

    @property
    def num_ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def row_words(self) -> int:
        """Return the words of a row, in lanes: two bfloat16 numbers each."""
        return self.width // (2 * LANES)

    @property
    def num_rows(self) -> int:
        """Return the maximum number of rows that a device sends: one per assignment."""
        return self.num_tokens * self.top_k

    @property
    def num_received(self) -> int:
        """Return the number of rows that a device can take: all rows of all ranks, in whole tiles for each slot."""
        return self.num_ranks * self.num_rows + self.num_slots * TILE_ROWS

    @property
    def num_lanes(self) -> int:
        """Return the number of slots of all ranks, in whole lanes."""
        return -(-self.num_ranks * self.num_slots // LANES) * LANES

    @property
    def counted_tokens(self) -> int:
        """Return the number of tokens in whole tiles of bfloat16."""
        return -(-self.num_tokens // CONVERTED_TOKENS) * CONVERTED_TOKENS

    @property
    def table_rows(self) -> int:
        """Return the number of rows of `dispatch_rows.table_rows`, in whole tiles."""
        return -(-(3 * self.num_ranks + 2) // SUBLANES) * SUBLANES

    @property
    def held_weights(self) -> tuple[tuple[tuple[int, int], str], ...]:
        """Return shapes and dtypes of an expert's arrays: gate, up and down, then their scales, if any."""
        up, down = (self.width, self.inner), (self.inner, self.width)
        matrices = tuple((shape, self.weight_dtype) for shape in (up, up, down))
        rows = (scale_rows(shape[0]) if self.in_blocks else 1 for shape in (up, up, down))
        scales = tuple(((count, shape[1]), "float32") for count, shape in zip(rows, (up, up, down), strict=True))
        return matrices + scales * (self.weight_dtype in NARROW)


class OperandRefs(NamedTuple):
    """Operands and result of the kernel, in its order."""

    first_1: Any
    """First slot of this device among the weights of all layers."""
    gates_TK: Any
    hidden_TD: Any
    slots_TK: Any
    weights_X: tuple[Any, ...]
    """Weights of all experts, in HBM."""
    out_TD: Any


class RowRefs(NamedTuple):
    """Rows, as words."""

    here: Any
    """Rows of this core's slots, then their results; in HBM for experts in blocks."""
    tokens: Any
    """Rows of this device's own tokens, then their sums."""
    sent: Any
    """A row per assignment, and a further row for assignments without a slot."""
    home: Any
    """Results, as `sent`."""
    held: Any
    """A group of `here`, for experts in blocks."""
    sums_RD: Any
    """Sums of the blocks of `held`, float32."""


class TableRefs(NamedTuple):
    """Slots, counts, and tables computed from them."""

    own_TK: Any
    """Slots of this core alone."""
    counts: Any
    """Counts by slot, a tile for each rank."""
    table: Any
    """See `dispatch_rows.table_rows`."""
    places: Any
    """See `dispatch_rows.places_of`."""
    table_s: Any
    """Copy of `table` for the scalar unit."""
    places_s: Any
    """Copy of `places` for the scalar unit."""
    next_s: Any
    """The next slot with rows, from each slot on."""
    first_s: Any
    """Index of the weights of this core's first slot."""


class SemaphoreRefs(NamedTuple):
    """Semaphores of copies."""

    counted: Any
    """Counts that left, counts that came, copies to scalars and of groups."""
    moved: Any
    """Rows that left, results that left, results that came."""
    weights_in: Any
    """Weights of each half."""
    arrived_S: Any
    """Rows of each slot that came."""


class Refs(NamedTuple):
    """Operands, result and scratch of the kernel."""

    operands: OperandRefs
    rows: RowRefs
    weights_H: tuple[Any, ...]
    """Weights of an expert or a block, two halves each."""
    tables: TableRefs
    semaphores: SemaphoreRefs


def refs_of(*given: Any) -> Refs:
    """Group the references of the kernel: operands, results, then the scratch of `scratch_of`."""
    rows = RowRefs(*given[6:12])
    return Refs(OperandRefs(*given[:6]), rows, given[12], TableRefs(*given[13:21]), SemaphoreRefs(*given[21:]))


def block_weights(sizes: DispatchSizes) -> tuple[tuple[tuple[int, int], str], ...]:
    """Return `held_weights` of a block; the scales of down are whole, which are read by whole tiles alone."""
    return (*replace(sizes, inner=sizes.block).held_weights[:5], *sizes.held_weights[5:])


def vmem_bytes(sizes: DispatchSizes) -> int:
    """Return the bytes of its memory that a core takes for a call."""
    # Of a group there are the rows, and sums in float32; tokens and sums of a grid's step are there twice.
    rows = 3 * GROUP_ROWS if sizes.is_streamed else sizes.of_core.num_received
    rows += 2 * (sizes.num_rows + 1) + 5 * sizes.counted_tokens
    num_lanes = sizes.of_core.num_lanes
    tables = (sizes.num_ranks * SUBLANES + sizes.table_rows) * num_lanes + 4 * sizes.counted_tokens * LANES
    weights = block_weights(sizes)
    block_bytes = sum(max(SUBLANES, n) * columns * jnp.dtype(dtype).itemsize for (n, columns), dtype in weights)
    return rows * sizes.width * 2 + 2 * block_bytes + tables * 4 + SPARE_BYTES


def scalar_bytes(sizes: DispatchSizes) -> int:
    """Return the bytes of scalar memory that a core takes for a call: gates and places of tokens, and the table.

    Scalar memory pads every row to whole lanes.
    """
    of_core = sizes.of_core
    rows_of_tokens = -(-sizes.num_tokens // SUBLANES) * SUBLANES + of_core.counted_tokens
    return 4 * (LANES * rows_of_tokens + of_core.table_rows * of_core.num_lanes)


def unsupported_reason(sizes: DispatchSizes, *, interpret: Any = False, core_bytes: int | None = None) -> str:
    """Return why the kernel does not take a call of these sizes; empty if it does. An interpreted call has no tiles.

    `core_bytes`: `usable_bytes` of the chip; None stands for the chip that is compiled for.
    """
    tile = 2 * LANES * (1 if interpret else SUBLANES)
    if sizes.width % tile:
        return f"rows of {sizes.width} are not whole tiles of {tile}"
    if sizes.inner % LANES:
        return f"an expert width of {sizes.inner} is not whole lanes of {LANES}"
    if not sizes.block:
        return f"{LANES} of an expert's width of {sizes.inner} do not fit twice with rows of {sizes.width}"
    if sizes.num_tokens > CONVERTED_TOKENS and sizes.num_tokens % CONVERTED_TOKENS:
        return f"{sizes.num_tokens} tokens are not a multiple of {CONVERTED_TOKENS}"
    if scalar_bytes(sizes) > SCALAR_BYTES:
        taken, usable = scalar_bytes(sizes) >> 10, SCALAR_BYTES >> 10
        return f"{sizes.num_tokens} tokens take {taken} KiB of the {usable} KiB of scalar memory"
    if core_bytes is None and not interpret:
        chip = pltpu.get_tpu_info()
        core_bytes = usable_bytes(chip.vmem_capacity_bytes)
    most, wanted = MAX_BYTES if core_bytes is None else core_bytes, vmem_bytes(sizes)
    if wanted > most:
        return f"{sizes.num_tokens} tokens take {wanted >> 20} MiB of the {most >> 20} MiB of a core's memory"
    return ""


def widest_block(width: int, inner: int, itemsize: int) -> int:
    """Return the maximum part of the expert width, in lanes that divide it, that fits twice; 0 if none does."""
    most = WEIGHT_BYTES // (2 * 3 * width * itemsize)
    return max((block for block in range(LANES, inner + 1, LANES) if inner % block == 0 and block <= most), default=0)


def usable_bytes(vmem_bytes: int) -> int:
    """Return the bytes of a core's memory that the kernel may use."""
    return min(MAX_BYTES, vmem_bytes * 3 // 4)


def scratch_of(sizes: DispatchSizes) -> list[Any]:
    """Return the scratch of a call, in the order of `refs_of`; rows in HBM are among its results."""

    def rows(number: int) -> Any:
        return pltpu.VMEM((number * sizes.row_words, LANES), jnp.uint32)

    group = GROUP_ROWS if sizes.is_streamed else SUBLANES
    table, places = (sizes.table_rows, sizes.num_lanes), (sizes.counted_tokens, LANES)
    return [
        *([] if sizes.is_streamed else [rows(sizes.num_received)]),
        rows(sizes.num_tokens),
        rows(sizes.num_rows + 1),
        rows(sizes.num_rows + 1),
        rows(group),
        pltpu.VMEM((group, sizes.width), jnp.float32),
        tuple(pltpu.VMEM((2, *shape), jnp.dtype(dtype)) for shape, dtype in block_weights(sizes)),
        pltpu.VMEM((sizes.counted_tokens, sizes.top_k), jnp.int32),
        pltpu.VMEM((sizes.num_ranks, SUBLANES, sizes.num_lanes), jnp.float32),
        pltpu.VMEM(table, jnp.int32),
        pltpu.VMEM(places, jnp.int32),
        pltpu.SMEM(table, jnp.int32),
        pltpu.SMEM(places, jnp.int32),
        pltpu.SMEM((sizes.num_slots + 1,), jnp.int32),
        pltpu.SMEM((1,), jnp.int32),
        *(pltpu.SemaphoreType.DMA((number,)) for number in (3, 3, 2, sizes.num_slots)),
    ]
