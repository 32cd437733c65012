"""A copy of a record differs in the given fields only."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import jax
import numpy as np
import pytest

from rayserve_moe.execution.step.pytrees import StepOutput
from rayserve_moe.scheduling.plan_builder import empty_schedule
from rayserve_moe.scheduling.record_copies import with_fields
from rayserve_moe.scheduling.step_plan import StepPlan

PLAN = StepPlan(7, columns=("top_ids",), holds_samples=True)


@pytest.mark.parametrize(
    ("record", "changed"),
    [
        (PLAN, {"masks": "other"}),
        (PLAN, {"step_id": 8, "columns": ()}),
        (empty_schedule(PLAN), {"plan": StepPlan(9), "endings": (1,)}),
        (StepOutput(np.ones(3), topk_ids_MTK=np.zeros(2)), {"topk_ids_MTK": None, "columns": {"top": np.ones(1)}}),
    ],
)
def test_it_equals_the_copy_of_replace(record: object, changed: dict[str, object]):
    before = dict(vars(record))
    found, wanted = with_fields(record, **changed), replace(record, **changed)
    assert type(found) is type(wanted) and [each.name for each in fields(found)] == list(vars(found))
    assert all(vars(found)[name] is value for name, value in vars(wanted).items())
    assert vars(record) == before
    assert jax.tree.structure(found) == jax.tree.structure(wanted)


def test_it_is_as_frozen_and_has_no_other_fields():
    with pytest.raises(FrozenInstanceError):
        with_fields(PLAN, step_id=8).step_id = 9
    with pytest.raises(AssertionError, match="no other fields"):
        with_fields(PLAN, mask="a field of another name")
