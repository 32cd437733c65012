"""Rows that drafts are made for stand once per sequence, on their data ranks, and come back in the plan's order."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.execution.drafts.rows import draft_rows, drafts_of
from rayserve_moe.scheduling.step_plan import Chunks, StepPlan


def plan_of(rows: list[int], samples: list[bool], *, wants_drafts: bool = True) -> StepPlan:
    count = len(rows)
    positions, ids = np.arange(count), np.zeros(count, np.int32)
    return StepPlan(
        0,
        Chunks(np.array(rows), positions, np.ones(count, np.int32), ids, np.array(samples)),
        wants_drafts=wants_drafts,
    )


def test_a_chain_of_samples_is_one_row():
    asked = draft_rows(
        plan_of([2, 2, 2, 0, 5, 7], [True] * 4 + [False, True]), sizes=(2, 4), rows_per_rank=4, num_ranks=2
    )
    assert asked is not None
    assert asked.rows_NS.tolist() == [[2, 0], [3, 4]]
    drafts_NSK = np.arange(12).reshape(2, 2, 3)
    assert drafts_of(drafts_NSK, asked.places).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize(("samples", "wants"), [(True, False), (False, True)])
def test_nothing_is_drafted_unasked_or_after_no_sample(samples: bool, wants: bool):
    plan = plan_of([1], [samples], wants_drafts=wants)
    assert draft_rows(plan, sizes=(4,), rows_per_rank=4, num_ranks=1) is None
