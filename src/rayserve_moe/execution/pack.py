"""From a StepPlan to the padded arrays of a compiled shape. The only place where plans become device input."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from rayserve_moe.decoding.sampling import SamplingBatch
from rayserve_moe.execution.buckets import choose_shape
from rayserve_moe.execution.row_state import RowState
from rayserve_moe.execution.step_types import StepInput, StepShape, as_device
from rayserve_moe.model.token_batch import TokenBatch
from rayserve_moe.scheduling.step_plan import StepPlan


@dataclass(frozen=True)
class PackedStep:
    """A step ready to run, and the way back.

    `token_places[i]` is where the plan's i-th token stands in the padded step; `sample_places[c]` is where chunk c's
    sample comes out, -1 where it has none.
    """

    shape: StepShape
    step_input: StepInput
    token_places: np.ndarray
    sample_places: np.ndarray


def pack(plan: StepPlan, rows: RowState, *, shapes: tuple[StepShape, ...]) -> PackedStep:
    """Lay out the plan's chunks: single tokens first, then every longer chunk in whole blocks."""
    is_single = plan.chunk_lengths == 1
    block = shapes[0].block_tokens
    blocks_of_chunk = np.where(is_single, 0, -(-plan.chunk_lengths // block))
    num_singles, num_blocks = int(is_single.sum()), int(blocks_of_chunk.sum())
    shape = choose_shape(shapes, num_singles=num_singles, num_blocks=num_blocks)
    first_block = np.cumsum(blocks_of_chunk) - blocks_of_chunk
    chunk_places = np.where(is_single, np.cumsum(is_single) - 1, shape.num_singles + first_block * block)
    chunk_of_token = np.repeat(np.arange(plan.num_chunks), plan.chunk_lengths)
    offsets = np.arange(plan.num_tokens) - np.repeat(
        np.cumsum(plan.chunk_lengths) - plan.chunk_lengths, plan.chunk_lengths
    )
    token_places = chunk_places[chunk_of_token] + offsets
    page_table = np.zeros((shape.num_singles + shape.num_blocks, rows.page_table.shape[1]), np.int32)
    page_table[:num_singles] = rows.page_table[plan.chunk_rows[is_single]]
    block_rows = np.repeat(plan.chunk_rows, blocks_of_chunk)
    page_table[shape.num_singles : shape.num_singles + num_blocks] = rows.page_table[block_rows]
    token_ids, kv_slots = np.zeros(shape.num_tokens, np.int32), np.zeros(shape.num_tokens, np.int32)
    positions = np.full(shape.num_tokens, -1, np.int32)
    token_ids[token_places] = plan.token_ids
    positions[token_places] = token_positions = plan.chunk_starts[chunk_of_token] + offsets
    kv_slots[token_places] = rows.kv_slots(plan.chunk_rows[chunk_of_token], token_positions)
    arrays = (as_device(array) for array in (token_ids, positions, kv_slots, page_table))
    batch = TokenBatch(*arrays, num_singles=shape.num_singles)
    sample_places = np.where(plan.chunk_samples, np.cumsum(plan.chunk_samples) - 1, -1)
    last_places = chunk_places + plan.chunk_lengths - 1
    step_input = StepInput(batch, *_sampling(plan, rows, size=shape.num_singles, last_places=last_places))
    return PackedStep(shape, step_input, token_places, sample_places)


def _sampling(plan: StepPlan, rows: RowState, *, size: int, last_places: np.ndarray) -> tuple[jax.Array, SamplingBatch]:
    """Which tokens are sampled from, and how: the last of every sampling chunk, then greedy rows that nobody reads."""
    chunks = np.flatnonzero(plan.chunk_samples)
    assert len(chunks) <= size, f"{len(chunks)} samples in a step of {size} rows"
    used = slice(0, len(chunks))
    places, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
    places[used] = last_places[chunks]
    positions[used] = plan.chunk_starts[chunks] + plan.chunk_lengths[chunks]
    floats, integers = np.zeros((3, size), np.float32), np.zeros((3, size), np.uint32)
    floats[1] = 1.0
    floats[:, used] = rows.sampling_floats[plan.chunk_rows[chunks]].T
    integers[:, used] = rows.sampling_integers[plan.chunk_rows[chunks]].T
    per_row = (as_device(array) for array in (*floats, *integers, positions))
    return as_device(places), SamplingBatch(*per_row)
