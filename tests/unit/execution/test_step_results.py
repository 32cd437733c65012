"""Results of a step: what is copied to the host ahead is what somebody wants, and no more."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import pytest

from rayserve_moe.execution.step.pytrees import StepOutput
from rayserve_moe.execution.step.results import only_wanted, start_copies, wanted_outputs
from rayserve_moe.scheduling.step_plan import StepPlan

ALWAYS = {"sampled_N3S", "tally_N4"}
COLUMNS = ("top", "entropy")


class Watched:
    """An array of another device, as far as copying it goes."""

    def __init__(self) -> None:
        self.num_copies = 0

    def copy_to_host_async(self) -> None:
        self.num_copies += 1


def copied(plan: StepPlan) -> set[str]:
    arrays = {field.name: Watched() for field in fields(StepOutput) if field.name != "columns"}
    columns = {name: Watched() for name in COLUMNS}
    output = StepOutput(**cast(Any, arrays), columns=columns)
    start_copies(only_wanted(output, wanted_outputs(plan)), is_needed=True)
    arrays |= columns
    assert all(array.num_copies <= 1 for array in arrays.values())
    return {name for name, array in arrays.items() if array.num_copies}


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({}, set()),
        ({"wants_routing": True}, {"topk_ids_MTK", "chosen_ITK"}),
        ({"columns": ("top_ids", "top_logprobs")}, {"top"}),
        ({"wants_expert_counts": True}, {"expert_counts_ME"}),
    ],
)
def test_what_a_plan_wants_is_copied_beside_the_samples(wanted: dict[str, Any], names: set[str]) -> None:
    assert copied(StepPlan(0, **wanted)) == ALWAYS | names


def test_what_a_step_does_not_bring_is_not_copied() -> None:
    sampled = Watched()
    output = StepOutput(cast(Any, sampled), {"top": Watched()})
    plan = StepPlan(0, wants_routing=True, wants_expert_counts=True)
    start_copies(only_wanted(output, wanted_outputs(plan)), is_needed=True)
    assert sampled.num_copies == 1
