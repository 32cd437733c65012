"""Results of a step: what is copied to the host ahead is what somebody wants, and no more."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import numpy as np
import pytest

from rayserve_moe.execution.step.pytrees import StepOutput
from rayserve_moe.execution.step.results import mask_columns, only_wanted, start_copies, wanted_outputs
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
        ({"wants_routing": True}, {"topk_ids_MTK", "chosen_ITK", "gates_MTK"}),
        ({"columns": ("top_ids", "top_logprobs")}, {"top"}),
        ({"wants_expert_counts": True}, {"expert_counts_ME"}),
    ],
)
def test_what_a_plan_wants_is_copied_beside_the_samples(wanted: dict[str, Any], names: set[str]) -> None:
    assert copied(StepPlan(0, **wanted)) == ALWAYS | names


@pytest.mark.parametrize("num_words", [1, 3])
def test_a_mask_is_the_ids_of_its_bits(num_words: int) -> None:
    """Unpacking all bits gives the same ids; a sample without a mask has none."""
    generator = np.random.default_rng(num_words)
    bits = generator.integers(-(2**31), 2**31, (6, num_words)).astype(np.int32)
    bits[[1, 4]] = 0
    logprobs, places = generator.random(6, np.float32), np.array([5, 1, 0, 4])
    columns = mask_columns(cast(Any, bits), cast(Any, logprobs), places=places)
    unpacked = np.unpackbits(bits[places].view(np.uint8), axis=1, bitorder="little")
    assert columns["mask_ids"].tolist() == [np.flatnonzero(row).tolist() for row in unpacked]
    assert columns["mask_logprobs"].tolist() == logprobs[places].tolist()


def test_what_a_step_does_not_bring_is_not_copied() -> None:
    sampled = Watched()
    output = StepOutput(cast(Any, sampled), {"top": Watched()})
    plan = StepPlan(0, wants_routing=True, wants_expert_counts=True)
    start_copies(only_wanted(output, wanted_outputs(plan)), is_needed=True)
    assert sampled.num_copies == 1
