"""Adapters of chunks reach their tokens on the device; a plan without adapters takes the programs without them."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from rayserve_moe.execution.step.inputs import InputLayout, unpack
from rayserve_moe.execution.step.pack import Packer
from rayserve_moe.execution.step.pytrees import StepShape
from rayserve_moe.scheduling.step_plan import AdapterWork, Chunks, StepPlan
from tests.support.devices.rank_state import state_of_rows

PLAIN = (StepShape(3, 0, 32), StepShape(3, 3, 32))
SHAPES = (*PLAIN, *(replace(shape, num_adapters=2) for shape in PLAIN))
NUM_ROWS = 3

unpacked = jax.jit(unpack, static_argnames=("layout", "page_size"))


def plan(slots: list[int] | None) -> StepPlan:
    """Rank 0: a single token and 40 tokens; rank 1: two chunks of one token."""
    lengths = np.array([1, 40, 1, 1])
    chunks = Chunks(
        rows=np.array([0, 2, 3, 5]),
        starts=np.array([9, 64, 7, 3]),
        lengths=lengths,
        token_ids=np.arange(100, 143, dtype=np.int32),
        samples=np.array([True, False, False, True]),
    )
    return StepPlan(0, chunks, adapters=None if slots is None else AdapterWork(np.array(slots, np.int32)))


def slots_of_tokens(step) -> list[list[int]]:
    """Return the slot of each token of each data rank, -1 for none."""
    layout = InputLayout(step.shape, NUM_ROWS)
    state = state_of_rows(NUM_ROWS, page_table_RP=np.zeros((NUM_ROWS, 8), np.int32))
    found = []
    for vector in step.vectors:
        tokens = unpacked(vector, state, layout=layout, page_size=16).adapters
        assert tokens is not None
        found.append(np.asarray(tokens.slot_T).tolist())
    return found


def test_each_token_of_a_chunk_has_its_adapter_and_padding_has_none():
    step = Packer(SHAPES, rows_per_rank=NUM_ROWS, num_data_ranks=2).pack(plan([5, 7, -1, 5]), with_changes=False)
    assert step.shape == SHAPES[3]
    first, second = slots_of_tokens(step)
    assert first == [5, -1, -1, *[7] * 64, *[-1] * 32], "a chunk of 40 tokens takes two blocks"
    assert second == [-1, 5, -1, *[-1] * 96]


def test_a_plan_without_adapters_runs_without_them():
    packer = Packer(SHAPES, rows_per_rank=NUM_ROWS, num_data_ranks=2)
    assert packer.pack(plan(None), with_changes=False).shape == SHAPES[1]
    alone = Packer(PLAIN, rows_per_rank=NUM_ROWS, num_data_ranks=2)
    for ours, theirs in zip(
        packer.pack(plan(None), with_changes=False).vectors,
        alone.pack(plan(None), with_changes=False).vectors,
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_decode_step_of_one_rank_has_the_adapters_of_its_rows():
    packer = Packer(SHAPES, rows_per_rank=NUM_ROWS)
    chunks = Chunks(np.array([2, 0]), np.array([4, 9]), np.ones(2, np.intp), np.array([8, 9]), np.array([True, True]))
    step = packer.pack(StepPlan(0, chunks, adapters=AdapterWork(np.array([-1, 3], np.int32))), with_changes=True)
    assert step.shape == SHAPES[2] and slots_of_tokens(step) == [[-1, 3, -1]]
