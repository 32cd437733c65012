"""A token goes to whoever it was sampled for, or to nobody."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.data_rank import DataRank
from rayserve_moe.scheduling.plan_builder import Schedule, build_schedule
from rayserve_moe.scheduling.rank_step import RankStep, StepLimits
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult
from rayserve_moe.scheduling.token_commit import NOT_FINITE, commit_tokens
from tests.support.engine.schedulers import STOP_TOKEN_ID, TOKEN, one, result_of

NUM_ROWS = 4


@pytest.fixture
def table() -> RowTable:
    return RowTable(num_rows=NUM_ROWS, max_tokens=40, page_size=4)


def running(table: RowTable, *, num_new: int = 8) -> list[Sequence]:
    """A sequence in every row, longer from row to row, of which all but the last token is computed."""
    sequences = [one(f"r{row}", 3 + row, num_new=num_new) for row in range(NUM_ROWS)]
    for row, sequence in enumerate(sequences):
        table.take(row, sequence)
        table.num_computed[row] = sequence.num_prompt_tokens - 1
    return sequences


def decode(table: RowTable, *rows: int) -> Schedule:
    """A step that goes on with `rows`."""
    rank = DataRank(0, range(NUM_ROWS), num_pages=100, table=table)
    rank.running += [table.sequences[row] for row in rows]
    step = RankStep(rank, limits=StepLimits(NUM_ROWS, 64, 64, 4, 100, 40), preempt=lambda _: pytest.fail("no pages"))
    step.add_running()
    return build_schedule(0, [step], table=table, captures_all=False)


def test_each_row_gets_its_own_token_where_it_ends(table: RowTable):
    sequences = running(table)
    schedule = decode(table, 3, 0, 2)
    ids, logprobs = np.array([30, 31, 32], np.int32), np.array([-3.0, -1.0, -2.0], np.float32)
    rows, endings = commit_tokens(table, schedule, result=StepResult(0, ids, logprobs, np.ones(3, bool)))
    assert rows.tolist() == [3, 0, 2] and endings == []
    assert [s.num_outputs for s in sequences] == [1, 0, 1, 1]
    assert [s.token_ids[s.num_prompt_tokens : s.num_tokens].tolist() for s in sequences] == [[31], [], [32], [30]]
    assert sequences[3].state.logprobs[6:7].tolist() == [-3.0]


@pytest.mark.parametrize("comes_back", ["another sequence", "the same sequence", "nobody"])
def test_a_row_that_changes_hands_does_not_take_the_token_of_the_one_before(table: RowTable, comes_back: str):
    sequences = running(table)
    schedule = decode(table, 0, 1, 2)
    gone = sequences[1]
    table.leave(gone)
    if comes_back == "another sequence":
        table.take(1, one("next", 5))
    elif comes_back == "the same sequence":
        table.take(1, gone)
    rows, _ = commit_tokens(table, schedule, result=result_of(schedule))
    assert rows.tolist() == [0, 2]
    owner = table.sequences[1]
    assert owner is None or owner.num_outputs == 0
    assert gone.num_outputs == 0 and gone.num_tokens == gone.num_prompt_tokens
    assert sequences[0].num_outputs == sequences[2].num_outputs == 1


def test_the_next_owner_does_not_end_by_the_failure_or_the_stop_of_the_one_before(table: RowTable):
    sequences = running(table)
    schedule = decode(table, 0, 1)
    for row in (0, 1):
        table.leave(sequences[row])
        table.take(row, one(f"next{row}", 5))
    assert commit_tokens(table, schedule, result=result_of(schedule, STOP_TOKEN_ID, not_finite=(0,)))[1] == []


def test_logits_that_are_not_finite_end_their_row_without_a_token(table: RowTable):
    sequences = running(table)
    schedule = decode(table, 0, 1, 2)
    rows, endings = commit_tokens(table, schedule, result=result_of(schedule, not_finite=(1,)))
    assert rows.tolist() == [0, 2]
    assert endings == [(1, NOT_FINITE)]
    assert [s.num_outputs for s in sequences] == [1, 0, 1, 0]


def test_a_stop_id_outranks_the_length(table: RowTable):
    running(table, num_new=1)
    schedule = decode(table, 0, 1)
    result = StepResult(0, np.array([STOP_TOKEN_ID, TOKEN], np.int32), np.zeros(2, np.float32), np.ones(2, bool))
    rows, endings = commit_tokens(table, schedule, result=result)
    assert endings == [(0, FinishReason("stop", matched=STOP_TOKEN_ID)), (1, FinishReason("length"))]
    assert rows.tolist() == [0, 1], "the last token is kept, whatever it is"


def test_nothing_sampled_is_nothing_committed(table: RowTable):
    schedule = decode(table)
    rows, endings = commit_tokens(table, schedule, result=result_of(schedule))
    assert len(rows) == 0 and endings == []
