"""The samples of a step that wait for their masks, which come with the plan of the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from rayserve_moe.execution.compiled_steps import CompiledSampler, Launched
from rayserve_moe.execution.pack import PackedStep
from rayserve_moe.execution.step_results import only_wanted
from rayserve_moe.execution.step_types import DeviceState, StepOutput
from rayserve_moe.request_fields import MAX_LISTED_IDS
from rayserve_moe.scheduling.step_plan import SampleMasks, StepPlan

NO_MASKS = SampleMasks(np.zeros(0, np.intp), np.zeros((0, 0), np.int32))
"""Any word may be sampled, and nothing is asked."""


def held_plans(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """The same step with its samples held, and the plan that has them drawn."""
    return replace(plan, holds_samples=True), StepPlan(step_id=plan.step_id, masks=NO_MASKS)


@dataclass
class HeldSamples:
    """Samples of the step `packed`: `logits` are those it has left, `drawn` waits for what came of them."""

    packed: PackedStep
    wants_top: bool = False
    wants_evidence: bool = False
    logits: jax.Array | None = None
    drawn: Launched | None = None

    def inputs(self, masks: SampleMasks | None, *, num_words: int) -> dict[str, np.ndarray]:
        """Of all samples of all data ranks the masks, int32 [A, num_words], what is asked, int32 [A, F], and rows."""
        held, places = self.packed.held, self.packed.sample_places
        assert held is not None, "the step has sampled"
        assert masks is not None, "masks follow a step that holds its samples"
        mask, asked = (
            np.full((held.shape[0] * held.shape[2], n), -1, np.int32) for n in (num_words, 1 + MAX_LISTED_IDS)
        )
        if len(masks.samples):
            mask[places[masks.samples]] = masks.bits
        self.wants_evidence = len(masks.asking) > 0
        if self.wants_evidence:
            asked[places[masks.asking]] = masks.asked
        return {"samples_N3S": held, "mask_AW": mask, "asked_AF": asked}

    def draw(
        self, samplers: Mapping[int, CompiledSampler], state: DeviceState, *, inputs: Mapping[str, np.ndarray]
    ) -> tuple[DeviceState, StepOutput]:
        """Run the program that samples, after the step; the output has what is wanted of it."""
        logits, self.logits = self.logits, None
        state, output = samplers[self.packed.shape.num_singles](state, logits, **inputs)
        wanted = {"sampled_N3S": True, "top_N2SJ": self.wants_top, "evidence_AF": self.wants_evidence}
        return state, only_wanted(output, frozenset(name for name, is_wanted in wanted.items() if is_wanted))

    def complete(self, output: StepOutput) -> StepOutput:
        """Wait for the samples; the step's output with them."""
        assert self.drawn is not None, "a plan with masks follows one that holds its samples"
        drawn = self.drawn()
        return replace(output, sampled_N3S=drawn.sampled_N3S, top_N2SJ=drawn.top_N2SJ, evidence_AF=drawn.evidence_AF)
