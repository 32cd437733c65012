"""What a step asks of one device, and of the kernels whose loops only a run can count."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rayserve_moe.kernels.tpu.dispatch_sizes import GROUP_ROWS, widest_block
from rayserve_moe.kernels.tpu.dispatch_sizes import TILE_ROWS as DISPATCH_TILE_ROWS
from rayserve_moe.kernels.tpu.grouped_ffn import TILE_ROWS, inner_block
from rayserve_moe.kernels.tpu.paged_sizes import CLEARED_ROWS
from rayserve_moe.kernels.tpu.rotary_heads import tile_tokens
from rayserve_moe.tools.hlo_report import HBM
from rayserve_moe.tools.hlo_text import Instruction

_TILING = re.compile(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"')
_NUMBERED = re.compile(r"(\.clone)*\.\d+$")
ROUND_SLACK = 1.5
"""Rows that an exchange can receive, over those of even routing (`experts.tokens.round_rows`)."""
PARALLEL = "dimension_semantics<parallel>"


@dataclass(frozen=True)
class AttentionWork:
    """The work of a call of paged attention in one layer."""

    num_query_blocks: int
    """Blocks of queries, or groups of single tokens."""
    num_visits: int
    """Visits of blocks of keys, by all blocks of queries."""
    kv_bytes: int
    """Bytes of keys and values that the visits read."""
    num_pages: int
    """Pages of the visits, which are copied one by one."""


@dataclass(frozen=True)
class StepWork:
    """A step's work on one device: per layer for kernels, in all for the roofline.

    `used_slots` of a layer's expert slots have any rows, `expert_rows` of them in all. `attention` is by query rows of
    a kernel call. `flops` and `hbm_bytes` are the least that the whole model takes: weights that are used and keys and
    values, each once.
    """

    used_slots: float
    expert_rows: float
    attention: dict[int, AttentionWork]
    flops: float
    hbm_bytes: float


@dataclass(frozen=True)
class KernelWork:
    """HBM bytes of one call of a kernel, and the trips of its nested open loops (see `Schedule.spent`).

    `exchanged_bytes` are those of rows that it sends to all devices, evenly, as often as it does.
    """

    hbm_bytes: float
    open_trips: tuple[float, ...]
    exchanged_bytes: float = 0.0


def kernel_name(instruction: Instruction) -> str:
    """A kernel's name without the number that makes it an instruction's; empty where it is no kernel."""
    is_kernel = instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes
    return _NUMBERED.sub("", instruction.name) if is_kernel else ""


def work_of(instruction: Instruction, operands: list[Instruction], *, work: StepWork) -> KernelWork | None:
    """What `work` is for a call of a known kernel; None for every other op."""
    match kernel_name(instruction):
        case "ragged-dot-none":
            return _grouped_product(instruction, operands, work)
        case "grouped_ffn":
            return _grouped_ffn(instruction, operands, work)
        case "low_latency_dispatch":
            return _low_latency_dispatch(instruction, operands, work)
        case "paged_attention" | "paged_attention_of_groups":
            return _paged_attention(instruction, work)
        case "streamed_heads":
            return _streamed_heads(instruction, operands)
        case "rotary_heads":
            return _rotary_heads(instruction, operands)
    return None


def _grouped_product(instruction: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Visits of row tiles: one per used slot, and one more wherever a tile ends within a slot's rows.

    A visit reads the weights of its slot again only where another slot was in between.
    """
    given = [shape for operand in operands for shape in operand.shapes]
    weights = max(given, key=lambda shape: len(shape.dims))
    *_, inner, outer = weights.dims
    tiling = _TILING.search(instruction.attributes)
    tile, inner_tile, outer_tile = map(int, tiling.groups()) if tiling else (128, inner, outer)
    # Where tokens come in chunks a call has a part of the rows, in an array for more than that.
    capacity = max(shape.dims[0] for shape in given if len(shape.dims) == len(weights.dims) - 1)
    rows = min(work.expert_rows, capacity / ROUND_SLACK)
    visits = work.used_slots + math.ceil(rows / tile) - 1
    blocks = math.ceil(inner / inner_tile) * math.ceil(outer / outer_tile)
    slot_bytes = weights.num_bytes / weights.num_elements * inner * outer
    shapes = [shape for shape in (*given, *instruction.shapes) if shape is not weights]
    rows_bytes = sum(shape.num_bytes for shape in shapes if shape.space == HBM)
    return KernelWork(work.used_slots * slot_bytes + rows_bytes, (max(1.0, visits) * blocks,))


def _grouped_ffn(instruction: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Tiles of rows: as many as all rows fill, and one more of each used slot, which begins within another one's."""
    given = [shape for operand in operands for shape in operand.shapes]
    weights, rows_out = [shape for shape in given if len(shape.dims) == 3], instruction.shapes[0]
    _, width, inner = weights[0].dims
    slot_bytes = sum(math.prod(shape.dims[1:]) * shape.num_bytes / shape.num_elements for shape in weights)
    rows = min(work.expert_rows, rows_out.dims[0] / ROUND_SLACK)
    blocks = inner // inner_block(width, inner, weights[0].num_bytes // weights[0].num_elements)
    shapes = [shape for shape in (*given, *instruction.shapes) if len(shape.dims) == 2 and shape.space == HBM]
    num_bytes = work.used_slots * slot_bytes + sum(shape.num_bytes for shape in shapes)
    return KernelWork(num_bytes, ((work.used_slots + rows / TILE_ROWS) * blocks,))


def _low_latency_dispatch(instruction: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Every row goes out and its result back. Tiles: as many as all rows fill, and one more of each used slot.

    Of experts in blocks the weights are read for every group of rows, and the rows lie in HBM: written and read as they
    come, and again as results.
    """
    given = [shape for operand in operands for shape in operand.shapes]
    weights = [shape for shape in given if len(shape.dims) == 3]
    _, width, inner = weights[0].dims
    slot_bytes = sum(math.prod(shape.dims[1:]) * shape.num_bytes / shape.num_elements for shape in weights)
    itemsize = weights[0].num_bytes // weights[0].num_elements
    out, *here = instruction.shapes
    shapes = [shape for shape in (*given, out) if shape not in weights and shape.space == HBM]
    row_bytes = work.expert_rows * out.num_bytes / math.prod(out.dims[:-1])
    num_bytes = work.used_slots * slot_bytes + sum(shape.num_bytes for shape in shapes)
    tiles = work.used_slots + work.expert_rows / DISPATCH_TILE_ROWS
    if not here:
        return KernelWork(num_bytes, (tiles,), 2 * row_bytes)
    blocks = inner // widest_block(width, inner, itemsize)
    trips = ((work.used_slots + work.expert_rows / GROUP_ROWS) * blocks, tiles * blocks)
    return KernelWork(num_bytes + 4 * row_bytes, trips, 2 * row_bytes)


def _streamed_heads(instruction: Instruction, operands: list[Instruction]) -> KernelWork:
    """The matrices of one layer, each read once, and the results; its own loop runs as often as its schedule says."""
    given = [shape for operand in operands for shape in operand.shapes if len(shape.dims) == 3]
    of_layer = sum(shape.num_bytes / shape.dims[0] for shape in given)
    return KernelWork(of_layer + sum(shape.num_bytes for shape in instruction.shapes if shape.space == HBM), ())


def _rotary_heads(instruction: Instruction, operands: list[Instruction]) -> KernelWork:
    """Tiles of tokens, of which two cores have equally many; each array is read or written once."""
    given = [shape for operand in operands for shape in operand.shapes]
    projected = [shape for shape in given if len(shape.dims) == 2][:3]
    num_tokens = projected[0].dims[0]
    tiles = math.ceil(num_tokens / tile_tokens(num_tokens, sum(shape.dims[1] for shape in projected)))
    shapes = [shape for shape in (*given, *instruction.shapes) if shape.space == HBM]
    return KernelWork(sum(shape.num_bytes for shape in shapes), (tiles + tiles % 2 if tiles > 1 else 1,))


def _paged_attention(instruction: Instruction, work: StepWork) -> KernelWork | None:
    out, *pool = instruction.shapes
    attention = work.attention.get(out.dims[0])
    if attention is None:
        return None
    if kernel_name(instruction) == "paged_attention_of_groups":
        # As below, in a loop over groups, whose rows lie in one piece of the pool, or now and then in one more. The
        # innermost is the wait for what the group before has written.
        rows, num_groups = out.dims[0], attention.num_query_blocks
        pieces = num_groups + max(0, rows - num_groups) / CLEARED_ROWS
        written = pieces * CLEARED_ROWS * pool[0].num_bytes / math.prod(pool[0].dims[:2])
        trips = (num_groups, attention.num_visits, attention.num_pages / 2, pieces)
        return KernelWork(attention.kv_bytes + written, trips)
    # Of the two loops over a block's pages, each runs for some of the blocks. New rows go back with their group.
    written = sum(out.dims[0] * CLEARED_ROWS * one.num_bytes / math.prod(one.dims[:2]) for one in pool)
    return KernelWork(attention.kv_bytes + written, (attention.num_visits, attention.num_pages / 2))
