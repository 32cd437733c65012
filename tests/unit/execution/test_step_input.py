"""The vector of a step has a place for everything, and one that is padding asks for nothing."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rayserve_moe.execution.step.inputs import InputLayout, change_pages, unpack
from rayserve_moe.execution.step.pytrees import DeviceState, StepShape
from tests.support.devices.rank_state import state_of_rows

NUM_ROWS = 3
PAGE_SIZE = 4
SHAPES = [StepShape(3, 0, 8), StepShape(3, 2, 8)]

changed = jax.jit(change_pages, static_argnames="layout")
unpacked = jax.jit(unpack, static_argnames=("layout", "page_size"))


def rows() -> DeviceState:
    page_table = np.arange(100, 100 + NUM_ROWS * 5, dtype=np.int32).reshape(NUM_ROWS, 5)
    return state_of_rows(NUM_ROWS, page_table_RP=page_table, last_tokens_R=np.full(NUM_ROWS, 77, np.int32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sections_fill_the_vector_without_a_gap(shape: StepShape):
    layout = InputLayout(shape, NUM_ROWS)
    at, places = layout.slices, np.arange(len(layout.padding))
    np.testing.assert_array_equal(np.concatenate([places[section] for section in at]), places)
    assert len(places[at.single_ids]) == 3 and len(places[at.block_ids]) == shape.num_blocks * 8


def test_only_steps_without_prompts_carry_changes():
    assert [InputLayout(shape, NUM_ROWS).num_changes for shape in SHAPES] == [3, 0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_changes_nothing_reads_nothing_and_is_greedy(shape: StepShape):
    layout = InputLayout(shape, NUM_ROWS)
    before = rows()
    np.testing.assert_array_equal(changed(before, layout.padding, layout=layout), before.page_table_RP)
    step = unpacked(layout.padding, before, layout=layout, page_size=PAGE_SIZE)
    assert step.batch.num_prefill_blocks == shape.num_blocks and len(step.batch.token_ids_T) == shape.num_tokens
    assert not step.batch.valid_T.any() and not step.batch.kv_slots_T.any()
    assert not step.batch.token_ids_T.any(), "nobody's last token is fed in"
    assert (step.sample_rows_S == NUM_ROWS).all()
    assert not step.sampling.temperature_S.any() and (step.sampling.limits.top_p_S == 1).all()
    assert not step.sampling.seed_S.any() and not step.sampling.num_top_S.any()
    assert not step.penalties.withholds_S.any()
    assert not step.penalties.is_adjusted_S.any() and (step.penalties.repetition_S == 1).all()


def test_single_tokens_and_blocks_know_their_rows():
    layout = InputLayout(SHAPES[1], NUM_ROWS)
    vector, at = layout.padding.copy(), layout.slices
    vector[at.single_rows], vector[at.block_rows] = [2, 0, 1], [1, 2]
    step = unpacked(vector, rows(), layout=layout, page_size=PAGE_SIZE)
    assert step.batch.rows_B is not None and step.batch.rows_B.tolist() == [2, 0, 1, 1, 2]


def test_changes_reach_the_rows_they_name():
    layout = InputLayout(SHAPES[0], NUM_ROWS)
    vector, at = layout.padding.copy(), layout.slices
    vector[at.change_rows][:2], vector[at.change_indices][:2], vector[at.change_pages][:2] = [2, 0], [1, 4], [7, 8]
    expected = rows().page_table_RP.copy()
    expected[2, 1], expected[0, 4] = 7, 8
    np.testing.assert_array_equal(changed(rows(), vector, layout=layout), expected)
