"""What is asked of tokens stands where their blocks stand, on the data rank that computes them."""

from __future__ import annotations

import numpy as np

from rayserve_moe.execution.step.pack import Packer
from rayserve_moe.execution.step.pytrees import StepShape
from rayserve_moe.scheduling.step_plan import BlockWork, StepPlan

SHAPES = (StepShape(3, 0, 32), StepShape(3, 3, 32))
NUM_TOKENS = 3 * 32
FORCED = np.arange(35 * 4).reshape(35, 2, 2)


def plan(work: BlockWork) -> StepPlan:
    """Rank 0: a single token and 40 tokens; rank 1: two chunks of one token."""
    lengths = np.array([1, 40, 1, 1])
    return StepPlan(
        0,
        chunk_rows=np.array([0, 2, 3, 5]),
        chunk_starts=np.array([9, 64, 7, 3]),
        chunk_lengths=lengths,
        token_ids=np.arange(100, 143, dtype=np.int32),
        chunk_samples=np.array([True, False, False, True]),
        block_work=work,
    )


def packed(work: BlockWork):
    return Packer(SHAPES, rows_per_rank=3, num_data_ranks=2).pack(plan(work), with_changes=False)


def test_scores_and_forced_rows_meet_their_tokens():
    scored = np.array([2, 3, 40, 41])
    work = BlockWork(np.array([1, 2]), scored, np.array([7, 8, 9, 11], np.int32), np.arange(5, 40), FORCED)
    blocks = packed(work).blocks
    assert blocks is not None and blocks.targets is not None and blocks.forced is not None
    expected = np.full((2, NUM_TOKENS), -1)
    expected[0, [1, 2, 39]], expected[1, 0] = [7, 8, 9], 11
    np.testing.assert_array_equal(blocks.targets, expected)
    assert blocks.score_places.tolist() == [1, 2, 39, NUM_TOKENS]
    assert blocks.forced.dtype == np.int16 and blocks.forced.shape == (2, 2, NUM_TOKENS, 2)
    np.testing.assert_array_equal(blocks.forced[0, :, 4:39].transpose(1, 0, 2), FORCED)
    assert (blocks.forced[1] == -1).all() and (blocks.forced[0, :, :4] == -1).all()


def test_a_chunk_of_one_token_takes_a_block_where_more_is_asked_of_it():
    work = BlockWork(np.array([2]), np.array([41]), np.array([11], np.int32))
    step = packed(work)
    of_rank = step.token_places[-2:] - step.shape.num_tokens
    assert of_rank.tolist() == [3, 0], "the first of the blocks, the first of the single tokens"
    assert step.blocks is not None and step.blocks.forced is None


def test_a_step_of_single_tokens_runs_in_a_shape_with_blocks_where_one_is_scored():
    lengths = np.ones(2, np.intp)
    work = BlockWork(np.array([1]), np.array([1]), np.array([4], np.int32))
    one_rank = Packer(SHAPES, rows_per_rank=3)
    scored = StepPlan(0, np.array([0, 1]), np.array([5, 6]), lengths, np.array([8, 9]), np.array([True, False]))
    assert one_rank.pack(scored, with_changes=False).shape.num_blocks == 0
    asked = StepPlan(**{**vars(scored), "block_work": work})
    assert not one_rank.fits(asked) and one_rank.pack(asked, with_changes=False).shape.num_blocks == 3


def test_where_nothing_is_asked_nothing_is_made():
    assert packed(BlockWork()).blocks is None
