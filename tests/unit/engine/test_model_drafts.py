"""A draft model is asked in time, and what it says counts for the tokens that it was said after."""

from __future__ import annotations

import numpy as np

from rayserve_moe.engine.speculation.model_drafts import ModelProposer, with_drafting
from rayserve_moe.scheduling.scheduler import Scheduler, StepLimits
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult
from tests.support.engine.workload import request_for

LIMITS = StepLimits(4, 32, 20, 16, 20, 512)


def started() -> tuple[Scheduler, Sequence]:
    scheduler = Scheduler(LIMITS)
    sequence = Sequence(request_for(np.arange(5, 35), max_new_tokens=8), 0, seed=1, stop_token_ids=frozenset())
    scheduler.add([sequence])
    return scheduler, sequence


def result_of(plan_id: int, count: int, drafts: np.ndarray | None) -> StepResult:
    ones = np.ones(count, np.int32)
    return StepResult(plan_id, 7 * ones, ones.astype(np.float32), ones, drafts=drafts)


def test_a_prompt_that_is_cut_goes_on_with_what_is_known():
    scheduler, _ = started()
    first = with_drafting(scheduler.schedule(), scheduler.table, wants_drafts=True)
    assert first.plan.next_ids is not None
    assert first.plan.next_ids.tolist() == [25] and first.plan.wants_drafts
    last = with_drafting(scheduler.schedule(), scheduler.table, wants_drafts=False)
    assert last.plan.next_ids is not None
    assert last.plan.next_ids.tolist() == [-1] and not last.plan.wants_drafts


def test_drafts_are_those_of_the_last_token_alone():
    scheduler, sequence = started()
    proposer = ModelProposer("eagle3")
    scheduler.commit(first := scheduler.schedule(), result_of(0, 0, None))
    proposer.keep(first, result_of(0, 0, None), table=scheduler.table)
    assert len(proposer.propose(sequence, 3)) == 0
    result = result_of(1, 1, np.array([[1, 2, 3]], np.int32))
    scheduler.commit(second := scheduler.schedule(), result)
    proposer.keep(second, result, table=scheduler.table)
    assert proposer.propose(sequence, 2).tolist() == [1, 2]
    scheduler.commit(scheduler.schedule(), result_of(2, 1, None))
    assert len(proposer.propose(sequence, 3)) == 0
