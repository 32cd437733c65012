"""Results of a step: what is copied to the host ahead is what somebody wants, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import pytest

from rayserve_moe.execution.step_results import WantedOutputs, start_copies
from rayserve_moe.execution.step_types import PromptScoreOutput, StepOutput

NOTHING = WantedOutputs(routing=False, top=False, scores=False, score_top=False, expert_counts=False)


class Watched:
    """An array of another device, as far as copying it goes."""

    def __init__(self) -> None:
        self.num_copies = 0

    def copy_to_host_async(self) -> None:
        self.num_copies += 1


def copied(wanted: WantedOutputs) -> set[str]:
    names = ("sampled", "routing", "top", "scores", "score_top", "expert_counts", "tally")
    arrays = {name: Watched() for name in names}
    of: Any = cast(dict[str, jax.Array], arrays)
    scores = PromptScoreOutput(of["scores"], of["score_top"])
    output = StepOutput(of["sampled"], of["routing"], of["top"], scores, of["expert_counts"], of["tally"])
    start_copies(output, wanted)
    assert all(array.num_copies <= 1 for array in arrays.values())
    return {name for name, array in arrays.items() if array.num_copies}


@pytest.mark.parametrize("name", ["routing", "top", "scores", "score_top", "expert_counts"])
def test_what_is_wanted_is_copied_beside_the_samples(name: str) -> None:
    assert copied(NOTHING) == {"sampled", "tally"}
    assert copied(replace(NOTHING, **{name: True})) == {"sampled", "tally", name}


def test_what_a_step_does_not_bring_is_not_copied() -> None:
    sampled = Watched()
    output = StepOutput(cast(Any, sampled), None, cast(Any, Watched()), None)
    start_copies(output, WantedOutputs(routing=True, top=False, scores=True, score_top=True, expert_counts=True))
    assert sampled.num_copies == 1
