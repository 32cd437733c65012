"""Steps that follow on drafts of which nothing has come back: when they may, and what they were once it has."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.rank_step import CANDIDATES
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.step_plan import AWAITED, DRAFTED, StepPlan, StepResult


def awaits(plan: StepPlan) -> bool:
    """Whether some of its chunks are awaited."""
    return plan.ancestors is not None and bool((plan.chunk_starts <= AWAITED).any())


def wants_every_token(scheduler: Scheduler) -> bool:
    """Whether what runs, or may run in the next step, has something for which its tokens have to be on the host."""
    table = scheduler.table
    if table.num_held or table.num_inspected:
        return True
    most = CANDIDATES + sum(len(rank.free_rows) for rank in scheduler.open_ranks)
    return any(each.is_held or each.inspection is not None for each in islice(scheduler.waiting, most))


def settled(table: RowTable, schedule: Schedule, *, before: Schedule, result: StepResult) -> Schedule:
    """A submitted step with awaited chunks as it has turned out, now that the one `before` is committed.

    Starts, drafts and what rows have computed are as if it had been planned now; of sequences that have left their rows
    nothing counts (`samples_that_count`).
    """
    plan = schedule.plan
    (chunks,) = np.nonzero(plan.chunk_starts <= AWAITED)
    rows, depths = plan.chunk_rows[chunks], AWAITED - plan.chunk_starts[chunks]
    starts, token_ids = plan.chunk_starts.copy(), plan.token_ids.copy()
    generations = np.full(len(table.generations), -1, np.int64)
    generations[schedule.sampling_rows] = schedule.sampling_generations
    is_there = table.generations[rows] == generations[rows]
    starts[chunks] = np.where(is_there, table.num_tokens[rows] - 1 + depths, 0)
    lengths = np.bincount(rows[is_there], minlength=len(generations))
    there = np.flatnonzero(lengths)
    table.num_computed[there] = table.num_tokens[there] - 1 + lengths[there]
    tokens = (np.cumsum(plan.chunk_lengths) - 1)[chunks]
    is_draft = token_ids[tokens] == DRAFTED
    if is_draft.any():
        assert result.drafts is not None, "drafts were asked for"
        places = np.zeros(len(generations), np.intp)
        drafted = before.sampling_rows
        of_drafted = drafted[np.concatenate([[True], drafted[1:] != drafted[:-1]])]
        places[of_drafted] = np.arange(len(of_drafted))
        token_ids[tokens[is_draft]] = result.drafts[places[rows[is_draft]], depths[is_draft] - 1]
    return replace(schedule, plan=replace(plan, chunk_starts=starts, token_ids=token_ids))
