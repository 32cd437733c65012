"""The samples of a step that wait for their masks, which come with the plan of the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from rayserve_moe.execution.compiled_steps import CompiledSampler, Launched
from rayserve_moe.execution.pack import PackedStep
from rayserve_moe.execution.step_types import DeviceState, StepOutput
from rayserve_moe.scheduling.step_plan import SampleMasks, StepPlan

NO_MASKS = SampleMasks(np.zeros(0, np.intp), np.zeros((0, 0), np.int32))
"""Any word may be sampled."""


def held_plans(plan: StepPlan) -> tuple[StepPlan, StepPlan]:
    """The same step with its samples held, and the plan that has them drawn."""
    return replace(plan, holds_samples=True), StepPlan(step_id=plan.step_id, masks=NO_MASKS)


@dataclass
class HeldSamples:
    """Samples of the step `packed`: `logits` are those it has left, `drawn` waits for what came of them."""

    packed: PackedStep
    wants_top: bool = False
    logits: jax.Array | None = None
    drawn: Launched | None = None

    def mask(self, masks: SampleMasks | None, *, num_words: int) -> np.ndarray:
        """The masks of all samples of all data ranks, int32 [A, num_words]."""
        held = self.packed.held
        assert held is not None, "the step has sampled"
        assert masks is not None, "masks follow a step that holds its samples"
        of_all = np.full((held.shape[0] * held.shape[2], num_words), -1, np.int32)
        if len(masks.samples):
            of_all[self.packed.sample_places[masks.samples]] = masks.bits
        return of_all

    def draw(
        self, samplers: Mapping[int, CompiledSampler], state: DeviceState, *, mask: np.ndarray
    ) -> tuple[DeviceState, StepOutput]:
        """Run the program that samples, after the step."""
        logits, self.logits = self.logits, None
        sampler = samplers[self.packed.shape.num_singles]
        return sampler(state, logits, samples_N3S=self.packed.held, mask_AW=mask)

    def complete(self, output: StepOutput) -> StepOutput:
        """Wait for the samples; the step's output with them."""
        assert self.drawn is not None, "a plan with masks follows one that holds its samples"
        drawn = self.drawn()
        return replace(output, sampled_N3S=drawn.sampled_N3S, top_N2SJ=drawn.top_N2SJ if self.wants_top else None)
