"""Which shapes are compiled. That every plan finds one is in `tests/properties/test_pack`."""

from __future__ import annotations

import pytest

from rayserve_moe.config.settings import SchedulerSettings
from rayserve_moe.execution.buckets import choose_shape, step_shapes
from rayserve_moe.execution.step_types import StepShape
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS as BLOCK


def test_decode_shapes_are_those_that_were_asked_for():
    shapes = step_shapes(SchedulerSettings(max_running_requests=4, max_step_tokens=64, decode_batch_sizes=(8, 1, 4, 4)))
    assert shapes == tuple(StepShape(*sizes, BLOCK) for sizes in ((1, 0), (4, 0), (8, 0), (8, 64 // BLOCK)))


def test_shapes_grow_by_factors_up_to_rows_and_step():
    shapes = step_shapes(SchedulerSettings(max_running_requests=20, max_step_tokens=600))
    assert [shape.num_singles for shape in shapes if not shape.num_blocks] == [1, 4, 16, 20]
    assert [shape.num_blocks for shape in shapes if shape.num_blocks] == [64 // BLOCK, 256 // BLOCK, -(-600 // BLOCK)]


@pytest.mark.parametrize(("num_singles", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8)])
def test_a_decode_step_is_padded_to_the_next_size(num_singles, bucket):
    shapes = step_shapes(SchedulerSettings(max_running_requests=8, max_step_tokens=64, decode_batch_sizes=(1, 4, 8)))
    assert choose_shape(shapes, num_singles=num_singles, num_blocks=0) == StepShape(bucket, 0, BLOCK)


def test_a_step_beyond_all_shapes_is_our_own_fault():
    with pytest.raises(AssertionError, match="9 single tokens"):
        choose_shape(step_shapes(SchedulerSettings(max_running_requests=8)), num_singles=9, num_blocks=0)
