"""The work of kernels whose loops have trips known only at run time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from rayserve_moe.execution.programs.buckets import PREFILL_BLOCK_TOKENS
from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE, WINDOW_ROWS
from rayserve_moe.kernels.tpu import chosen_attention, device_rows, device_sums, token_index
from rayserve_moe.kernels.tpu.delta_visits import TILE
from rayserve_moe.kernels.tpu.dispatch_sizes import GROUP_ROWS, widest_block
from rayserve_moe.kernels.tpu.dispatch_sizes import TILE_ROWS as DISPATCH_TILE_ROWS
from rayserve_moe.kernels.tpu.grouped_ffn import TILE_ROWS, inner_block
from rayserve_moe.kernels.tpu.paged_sizes import CLEARED_ROWS, NUM_BUFFERS, group_trips, tile_trips
from rayserve_moe.kernels.tpu.rotary_heads import tile_tokens
from rayserve_moe.kernels.tpu.top_tokens import CHUNK_POSITIONS
from rayserve_moe.tools.estimate.bundles import RegionRuns, Schedule, Spent
from rayserve_moe.tools.estimate.rates import ATTENTION, KERNEL, PROMPT_ATTENTION
from rayserve_moe.tools.estimate.step_work import AttentionSizes, RecurrentWork, SparseWork, StepWork
from rayserve_moe.tools.hlo_report import HBM
from rayserve_moe.tools.hlo_text import Instruction

_TILING = re.compile(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"')
_NUMBERED = re.compile(r"(\.clone)*\.\d+$")
ROUND_SLACK = 1.5
"""Rows that an exchange can receive, relative to even routing (`experts.tokens.round_rows`)."""
PARALLEL = "dimension_semantics<parallel>"


@dataclass(frozen=True)
class KernelWork:
    """Work of a kernel call."""

    hbm_bytes: float
    open_trips: tuple[float, ...]
    """Trips of nested loops that are known only at run time (see `Schedule.spent`)."""
    exchanged_bytes: float = 0.0
    """Bytes of rows that the kernel sends evenly to all devices, counted for each transfer."""
    trips_each: tuple[float, ...] = ()
    """Instead of `open_trips`: trips per entry of every such loop, in order."""
    region_runs: tuple[RegionRuns, ...] = ()
    """Executions of regions that few steps of the grid run."""
    kind: str = KERNEL
    """Kind of op (`rates.SPREADS`)."""
    visits: float = 0.0
    """Copies that follow each other, by all cores; 0: as in the schedule."""
    num_ahead: int = 1
    """Copies in flight at a time."""
    trips_beside: tuple[float, ...] = ()
    """As `trips_each`, with 0 for loops that run beside copies: the bundles of others are added to their time. Empty:
    those before the first large copy are."""

    def lead_bundles(self, schedule: Schedule, spent: Spent, *, iterations: int) -> float:
        """Return the bundles of a core that no copy hides."""
        if not self.trips_beside:
            return spent.lead_bundles
        return schedule.spent(iterations=iterations, trips_each=self.trips_beside).bundles

    def of_core(self, schedule: Schedule, *, cores: int, iterations: int) -> Spent:
        """Return the cost of the schedule of one of the cores that divide the work."""
        return schedule.spent(
            iterations=iterations,
            open_trips=[trips / cores for trips in self.open_trips],
            trips_each=self.trips_each,
            region_runs=[replace(region, runs=region.runs / cores) for region in self.region_runs],
        )


def kernel_name(instruction: Instruction) -> str:
    """Return a kernel's name without its instruction number; empty for any other op."""
    is_kernel = instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes
    return _NUMBERED.sub("", instruction.name) if is_kernel else ""


def work_of(instruction: Instruction, operands: list[Instruction], *, work: StepWork) -> KernelWork | None:
    """Return the work of a call of a known kernel; None for every other op."""
    match kernel_name(instruction):
        case "ragged-dot-none":
            return _grouped_product(instruction, operands, work)
        case "device_sums" | "place_rows" | "add_rows" as name:
            return _DEVICE_SUMS[name](instruction, operands, work)
        case "grouped_ffn":
            return _grouped_ffn(instruction, operands, work)
        case "low_latency_dispatch":
            return _low_latency_dispatch(instruction, operands, work)
        case "paged_attention" | "paged_attention_of_groups":
            return _paged_attention(instruction, work)
        case "streamed_heads" | "rotary_heads" | "absorb_queries" | "expand_values" as name:
            return _HEADS[name](instruction, operands)
        case "token_index" | "chosen_attention" as name if work.sparse:
            count = _token_index if name == "token_index" else _chosen_attention
            return count(instruction, operands, work.sparse)
        case "delta_rule":
            return _delta_rule(instruction, work.recurrent) if work.recurrent else None
    return None


def _grouped_product(instruction: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Count visits of row tiles: one per used slot, and another for each tile that ends within a slot's rows.

    A visit reads its slot's weights again only if another slot came in between.
    """
    given = [shape for operand in operands for shape in operand.shapes]
    weights = max(given, key=lambda shape: len(shape.dims))
    *_, inner, outer = weights.dims
    tiling = _TILING.search(instruction.attributes)
    tile, inner_tile, outer_tile = map(int, tiling.groups()) if tiling else (128, inner, outer)
    # With chunked tokens a call has a part of the rows, in an array with space for more.
    capacity = max(shape.dims[0] for shape in given if len(shape.dims) == len(weights.dims) - 1)
    rows = min(work.expert_rows, capacity / ROUND_SLACK)
    visits = work.used_slots + math.ceil(rows / tile) - 1
    blocks = math.ceil(inner / inner_tile) * math.ceil(outer / outer_tile)
    slot_bytes = weights.num_bytes / weights.num_elements * inner * outer
    shapes = [shape for shape in (*given, *instruction.shapes) if shape is not weights]
    rows_bytes = sum(shape.num_bytes for shape in shapes if shape.space == HBM)
    return KernelWork(
        work.used_slots * slot_bytes + rows_bytes, (max(1.0, visits) * blocks,), visits=max(1.0, visits) * blocks
    )


def _grouped_ffn(instruction: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Count row tiles: enough for all rows, plus one per used slot, since a slot begins within another slot's tile."""
    given = [shape for operand in operands for shape in operand.shapes]
    weights, rows_out = [shape for shape in given if len(shape.dims) == 3], instruction.shapes[0]
    _, width, inner = weights[0].dims
    slot_bytes = sum(math.prod(shape.dims[1:]) * shape.num_bytes / shape.num_elements for shape in weights)
    rows = min(work.expert_rows, rows_out.dims[0] / ROUND_SLACK)
    blocks = inner // inner_block(width, inner, weights[0].num_bytes // weights[0].num_elements)
    shapes = [shape for shape in (*given, *instruction.shapes) if len(shape.dims) == 2 and shape.space == HBM]
    num_bytes = work.used_slots * slot_bytes + sum(shape.num_bytes for shape in shapes)
    return KernelWork(num_bytes, ((work.used_slots + rows / TILE_ROWS) * blocks,), visits=work.used_slots * blocks)


def _device_sums(_: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Count the tiles of a slot, of which the last is half empty, and the rows that a chunk receives and returns.

    Loops with unknown trips, in order: slots, clear rows, list a sender's assignments, tiles, add a tile's rows, pack
    rows. Rows are cleared and packed in one step of the grid, and count in each.
    """
    given = [shape for operand in operands for shape in operand.shapes]
    weights, begin, places = [shape for shape in given if len(shape.dims) == 3], given[1], given[3]
    rows = max((shape for shape in given if len(shape.dims) == 2), key=lambda shape: shape.num_bytes)
    width = weights[0].dims[1]
    num_ranks = begin.dims[0]
    num_assigned = places.num_elements / num_ranks - device_sums.UNROLLED
    num_rows, of_slot = rows.num_bytes / (2 * width) * work.device_share, num_assigned / work.used_slots
    slot_bytes = sum(math.prod(shape.dims[1:]) * shape.num_bytes / shape.num_elements for shape in weights)
    of_step, tile = num_rows / device_sums.UNROLLED / work.used_slots, device_sums.TILE_ROWS
    tiles = of_slot / tile + 0.5
    listed = of_slot / num_ranks / device_sums.UNROLLED + 0.5
    trips = (work.used_slots, of_step, listed, tiles, of_slot / tiles / device_sums.UNROLLED, of_step)
    scalars = sum(shape.num_bytes for shape in given if shape not in weights and shape is not rows)
    return KernelWork(work.used_slots * slot_bytes + 2 * num_rows * 2 * width + scalars, (), trips_each=trips)


def _place_rows(instruction: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Count the rows that a chunk sends. Loops with unknown trips: groups of rows, and the wait for the last two."""
    tokens = max((shape for one in operands for shape in one.shapes), key=lambda shape: shape.num_bytes)
    num_bytes = instruction.shapes[0].num_bytes * work.device_share
    groups = num_bytes / (device_rows.GROUP_ROWS * 2 * tokens.dims[-1])
    return KernelWork(tokens.num_bytes + num_bytes, (), trips_each=(groups, 2.0))


def _add_rows(instruction: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Count the bytes of the rows that come back, and of the sums; the trips are in the schedule."""
    rows = max((shape for one in operands for shape in one.shapes), key=lambda shape: shape.num_bytes)
    return KernelWork(rows.num_bytes * work.device_share + instruction.shapes[0].num_bytes, ())


_DEVICE_SUMS = {"device_sums": _device_sums, "place_rows": _place_rows, "add_rows": _add_rows}


def _low_latency_dispatch(instruction: Instruction, operands: list[Instruction], work: StepWork) -> KernelWork:
    """Count the tiles (enough for all rows, plus one per used slot) and the rows that are sent out and returned.

    With experts in blocks, weights are read for every group of rows, and rows are in HBM: written and read on arrival,
    and again as results.
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
        return KernelWork(num_bytes, (tiles,), 2 * row_bytes, visits=work.used_slots)
    blocks = inner // widest_block(width, inner, itemsize)
    trips = ((work.used_slots + work.expert_rows / GROUP_ROWS) * blocks, tiles * blocks)
    return KernelWork(num_bytes + 4 * row_bytes, trips, 2 * row_bytes, visits=trips[0])


def _streamed_heads(instruction: Instruction, operands: list[Instruction]) -> KernelWork:
    """Count the bytes of a layer's matrices, each read once, and of the results; the trips are in the schedule."""
    given = [shape for operand in operands for shape in operand.shapes if len(shape.dims) == 3]
    of_layer = sum(shape.num_bytes / shape.dims[0] for shape in given)
    return KernelWork(of_layer + sum(shape.num_bytes for shape in instruction.shapes if shape.space == HBM), ())


def _products_of_heads(instruction: Instruction, operands: list[Instruction]) -> KernelWork:
    """Count the bytes of a layer's matrices, which come last, and of rows in HBM; the trips are in the schedule."""
    *rows, matrices = [shape for operand in operands for shape in operand.shapes]
    num_bytes = sum(shape.num_bytes for shape in (*rows, *instruction.shapes) if shape.space == HBM)
    return KernelWork(matrices.num_bytes / matrices.dims[0] + num_bytes, ())


def _rotary_heads(instruction: Instruction, operands: list[Instruction]) -> KernelWork:
    """Count token tiles, rounded up to an equal number per core; each array is read or written once."""
    given = [shape for operand in operands for shape in operand.shapes]
    projected = [shape for shape in given if len(shape.dims) == 2][:3]
    num_tokens = projected[0].dims[0]
    tiles = math.ceil(num_tokens / tile_tokens(num_tokens, sum(shape.dims[1] for shape in projected)))
    shapes = [shape for shape in (*given, *instruction.shapes) if shape.space == HBM]
    return KernelWork(sum(shape.num_bytes for shape in shapes), (tiles + tiles % 2 if tiles > 1 else 1,))


_HEADS = {
    "streamed_heads": _streamed_heads,
    "rotary_heads": _rotary_heads,
    "absorb_queries": _products_of_heads,
    "expand_values": _products_of_heads,
}


def _paged_attention(instruction: Instruction, work: StepWork) -> KernelWork | None:
    out, *pool = instruction.shapes
    attention = work.attention.get(AttentionSizes(out.dims[0], out.dims[1], out.dims[3]))
    if attention is None:
        return None
    kind = PROMPT_ATTENTION if attention.is_of_prompts else ATTENTION
    num_visits, num_pages, num_groups = attention.num_visits, attention.num_pages, attention.num_query_blocks
    if kernel_name(instruction) == "paged_attention_of_groups":
        # A group's rows are in a single piece of the pool, or sometimes two.
        pieces = num_groups + max(0, out.dims[0] - num_groups) / CLEARED_ROWS
        trips = group_trips(num_groups, num_visits, num_pages, num_tokens=out.dims[0], num_pieces=pieces)
    else:
        # New rows go back with their group.
        pieces, trips = out.dims[0] if pool else 0, tile_trips(num_groups, num_visits, num_pages)
    written = sum(pieces * CLEARED_ROWS * one.num_bytes / math.prod(one.dims[:2]) for one in pool)
    num_bytes, ahead = attention.kv_bytes + written, NUM_BUFFERS - 1
    return KernelWork(num_bytes, (), trips_each=trips, kind=kind, visits=num_groups, num_ahead=ahead)


def _token_index(instruction: Instruction, operands: list[Instruction], sparse: SparseWork) -> KernelWork:
    """Count the blocks of keys of the visits that score any, and the chunks of their scores.

    Loops with unknown trips, in order: pages of a core's first block, chunks to clear, blocks, pages of the next block
    or of the next visit's first, parts of a block for some queries, chunks to count twice, to mark, to gather from.
    """
    num_steps, num_queries, _ = instruction.shapes[0].dims
    queries, pool = [shape for one in operands for shape in one.shapes if len(shape.dims) == 3][::2]
    context, visits = sparse.context, sparse.index_tokens
    if num_queries > 1:
        context, visits = sparse.prompt_context, sparse.index_blocks * PREFILL_BLOCK_TOKENS // num_queries
    pages, of_block = math.ceil(context / pool.dims[1]), token_index.pages_of_a_block(pool.dims[1])
    blocks, chunks = max(1, math.ceil(pages / of_block)), math.ceil(context / CHUNK_POSITIONS)
    at_once = token_index.queries_at_once(num_queries, queries.dims[1] // num_queries)
    parts = math.ceil(context / token_index.SCORE_KEYS) / blocks * num_queries / at_once
    of_step, first = visits / num_steps, min(pages, of_block) / num_steps if visits else 0.0
    of_blocks = (pages / blocks * (1 - 1 / blocks), pages / blocks**2, parts)
    trips = (first, num_queries * chunks * of_step, blocks * of_step, *of_blocks, *[chunks * of_step] * 4)
    beside, num_bytes = (*trips[:2], 0.0, *trips[3:]), visits * pages * pool.num_bytes / pool.dims[0]
    return KernelWork(num_bytes, (), trips_each=trips, trips_beside=beside, visits=visits)


def _chosen_attention(instruction: Instruction, operands: list[Instruction], sparse: SparseWork) -> KernelWork:
    """Count the blocks of chosen tokens. Loops with unknown trips: blocks, and pieces of a token's last block to clear.

    The copies for a core's first token count for every token, which adds 1 %.
    """
    pool = max((shape for one in operands for shape in one.shapes), key=lambda shape: shape.num_bytes)
    blocks, num_steps = math.ceil(sparse.top_k / chosen_attention.BLOCK_TOKENS), instruction.shapes[0].dims[0]
    of_group = pool.num_bytes // pool.dims[0]
    return KernelWork(
        sparse.num_tokens * blocks * chosen_attention.BLOCK_TOKENS * of_group,
        (),
        trips_each=(blocks * sparse.num_tokens / num_steps, 4 / blocks),
        kind=ATTENTION,
        visits=sparse.num_tokens,
    )


def _delta_rule(instruction: Instruction, work: RecurrentWork) -> KernelWork:
    """Count the bytes and the code of visits, pieces, tokens and folds.

    A visit reads a state, sums of decays, and its ring up to the cursor in tiles of tokens; it writes the sums. With a
    decay per element of a key, sums lie in the ring. A piece reads a tile of tokens. A fold writes a state and copies a
    window. `RegionRuns` find the code of each by the size of its copies.
    """
    out, *pools = instruction.shapes
    value_row = out.num_bytes / out.dims[0]
    state, window, keys, _, decays, inputs = (pool.num_bytes / pool.dims[0] for pool in pools)
    key_row, input_row, by_element = keys / CHUNK, inputs / WINDOW_ROWS, len(pools[4].dims) == 4
    ring_row, sums = (key_row + value_row + decays / CHUNK, 0.0) if by_element else (key_row + value_row, decays)
    num_pieces, num_tokens = work.num_singles + work.num_blocks, work.num_singles + PIECE * work.num_blocks
    of_visit = state + 2 * sums + work.ring_tokens * ring_row
    of_token = ring_row + value_row + 2 * input_row
    num_bytes = work.num_visits * of_visit + num_pieces * PIECE * (key_row + ring_row) + num_tokens * of_token
    num_bytes += work.num_folds * (state + 2 * window)
    tiles, share = work.ring_tokens / TILE, work.num_singles / num_pieces
    # Loops over tiles begin a core's first visit, and its second, wait for a visit, sort it, and begin a later one.
    # Loops that wait for writes stand ahead of a fold and at the end, those of rows that are written alone inside them,
    # ahead of the writes of a piece, and around them.
    waits = (2.0, share) if by_element else (2.0, share, 2.0)
    size, row = int(state), int(value_row)
    runs = (
        (size, True, True, num_pieces),
        (size, True, False, 1.0),
        (size, True, False, work.num_visits),
        (size, False, True, work.num_folds),
        (PIECE * row, False, True, work.num_blocks),
    )
    if not by_element:
        runs = (*runs, (row, False, True, work.num_singles), (int(sums), False, True, work.num_visits))
    return KernelWork(
        num_bytes,
        (),
        visits=work.num_visits,
        trips_each=(*[tiles] * 5, *waits, share, share if by_element else 1.0, *waits),
        region_runs=tuple(RegionRuns(of, reads=reads, writes=writes, runs=count) for of, reads, writes, count in runs),
    )
