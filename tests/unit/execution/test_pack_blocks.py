"""What is asked of tokens stands where their blocks stand, on the data rank that computes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayserve_moe.execution.step.pack import Packer
from rayserve_moe.execution.step.probe import MAX_PROBED, probe_runs
from rayserve_moe.execution.step.pytrees import StepShape
from rayserve_moe.scheduling.step_plan import BlockWork, Chunks, StepPlan
from rayserve_moe.scheduling.token_probe import TokenProbe

SHAPES = (StepShape(3, 0, 32), StepShape(3, 3, 32))
NUM_TOKENS = 3 * 32
FORCED = np.arange(35 * 4).reshape(35, 2, 2)


def plan(work: BlockWork) -> StepPlan:
    """Rank 0: a single token and 40 tokens; rank 1: two chunks of one token."""
    lengths = np.array([1, 40, 1, 1])
    return StepPlan(
        0,
        Chunks(
            rows=np.array([0, 2, 3, 5]),
            starts=np.array([9, 64, 7, 3]),
            lengths=lengths,
            token_ids=np.arange(100, 143, dtype=np.int32),
            samples=np.array([True, False, False, True]),
        ),
        block_work=work,
    )


def packed(work: BlockWork):
    return Packer(SHAPES, rows_per_rank=3, num_data_ranks=2).pack(plan(work), with_changes=False)


def test_forced_rows_meet_their_tokens():
    blocks = packed(BlockWork(np.array([1, 2]), np.arange(5, 40), FORCED)).blocks
    assert blocks is not None and blocks.forced is not None
    assert blocks.forced.dtype == np.int16 and blocks.forced.shape == (2, 2, NUM_TOKENS, 2)
    np.testing.assert_array_equal(blocks.forced[0, :, 4:39].transpose(1, 0, 2), FORCED)
    assert (blocks.forced[1] == -1).all() and (blocks.forced[0, :, :4] == -1).all()


def test_a_chunk_of_one_token_takes_a_block_where_more_is_asked_of_it():
    work = BlockWork(np.array([2]))
    step = packed(work)
    of_rank = step.token_places[-2:] - step.shape.num_tokens
    assert of_rank.tolist() == [3, 0], "the first of the blocks, the first of the single tokens"
    assert step.blocks is not None and step.blocks.forced is None


def test_a_step_of_single_tokens_runs_in_a_shape_with_blocks_where_one_is_scored():
    lengths = np.ones(2, np.intp)
    work = BlockWork(np.array([1]))
    one_rank = Packer(SHAPES, rows_per_rank=3)
    scored = StepPlan(0, Chunks(np.array([0, 1]), np.array([5, 6]), lengths, np.array([8, 9]), np.array([True, False])))
    assert one_rank.pack(scored, with_changes=False).shape.num_blocks == 0
    asked = replace(scored, block_work=work)
    assert not one_rank.fits(asked) and one_rank.pack(asked, with_changes=False).shape.num_blocks == 3


def test_probed_tokens_are_found_among_those_of_all_ranks():
    probe = TokenProbe(
        np.array([2, 40, 41]), np.array([7, 9, 11], np.int32), np.full((3, 2), 5, np.int32), 2, ("ranks",)
    )
    step = Packer(SHAPES, rows_per_rank=3, num_data_ranks=2).pack(
        replace(plan(BlockWork(np.array([1, 2]))), probe=probe), with_changes=False
    )
    (run,) = probe_runs(probe, step)
    per_rank = step.shape.num_tokens
    assert len(step.probed_places) == 3
    assert run.places_P[:4].tolist() == [SHAPES[1].num_singles + 1, SHAPES[1].num_singles + 39, per_rank + 3, -1]
    assert run.targets_P[:4].tolist() == [7, 9, 11, -1] and run.listed_PL[:4, :3].tolist() == [[5, 5, -1]] * 3 + [
        [-1] * 3
    ]


def test_more_tokens_than_a_run_holds_take_several():
    count = MAX_PROBED + 3
    short = plan(BlockWork())
    lengths, token_ids = np.array([1, count, 1, 1]), np.zeros(count + 3, np.int32)
    long = replace(short, chunks=replace(short.chunks, lengths=lengths, token_ids=token_ids))
    shapes = (StepShape(3, 0, 32), StepShape(3, 6, 32))
    probe = TokenProbe(np.arange(1, 1 + count), np.arange(count, dtype=np.int32), np.zeros((count, 0), np.int32))
    step = Packer(shapes, rows_per_rank=3, num_data_ranks=2).pack(replace(long, probe=probe), with_changes=False)
    runs = list(probe_runs(probe, step))
    assert [int((run.places_P >= 0).sum()) for run in runs] == [MAX_PROBED, 3]
    assert np.concatenate([run.targets_P for run in runs])[:count].tolist() == list(range(count))


def test_where_nothing_is_asked_nothing_is_made():
    assert packed(BlockWork()).blocks is None
