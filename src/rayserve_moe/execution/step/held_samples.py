"""The samples of a step that wait for their masks, which come with the plan of the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from rayserve_moe.decoding.logit_processors import LogitProcessor, processed_size
from rayserve_moe.execution.programs.compiled import CompiledSampler, Launched
from rayserve_moe.execution.step.pack import PackedStep
from rayserve_moe.execution.step.pytrees import DeviceState, StepOutput
from rayserve_moe.execution.step.results import only_wanted
from rayserve_moe.execution.step.samples import HeldInputs
from rayserve_moe.requests.columns import WANTS_MASK
from rayserve_moe.requests.fields import MAX_LISTED_IDS
from rayserve_moe.requests.processor_arguments import NOT_PROCESSED, NUM_RECENT
from rayserve_moe.scheduling.step_plan import SampleMasks, StepPlan

NO_MASKS = SampleMasks(np.zeros(0, np.intp), np.zeros((0, 0), np.int32))
"""Any word may be sampled, and nothing is asked."""


def held_plans(plan: StepPlan) -> list[StepPlan]:
    """The same step with its samples held, and the plan that has them drawn; and both with evidence asked."""
    nothing = replace(NO_MASKS, asking=np.zeros(1, np.intp), asked=np.full((1, 1 + MAX_LISTED_IDS), -1, np.int32))
    held = replace(plan, holds_samples=True)
    drawn = (StepPlan(step_id=plan.step_id, masks=masks) for masks in (NO_MASKS, nothing))
    return [each for draws in drawn for each in (held, draws)]


@dataclass
class HeldSamples:
    """Samples of the step `packed`: `logits` are those it has left, `drawn` waits for what came of them."""

    packed: PackedStep
    wants_top: bool = False
    wants_evidence: bool = False
    wants_mask: bool = False
    num_processed: int = 0
    logits: jax.Array | None = None
    drawn: Launched | None = None

    def inputs(self, masks: SampleMasks | None, *, num_words: int) -> HeldInputs:
        """What the samples of all data ranks are drawn by, with masks of `num_words`."""
        held, places = self.packed.held, self.packed.sample_places
        assert held is not None, "the step has sampled"
        assert masks is not None, "masks follow a step that holds its samples"
        count, asked = held.shape[0] * held.shape[2], None
        mask = np.full((count, num_words), -1, np.int32)
        if len(masks.samples):
            mask[places[masks.samples]] = masks.bits
        self.wants_evidence = len(masks.asking) > 0
        if self.wants_evidence:
            asked = np.full((count, 1 + MAX_LISTED_IDS), -1, np.int32)
            asked[places[masks.asking]] = masks.asked
            self.wants_mask = bool((masks.asked[:, 0] >= WANTS_MASK).any())
        processed = None
        if self.num_processed:
            processed = np.zeros((len(mask), self.num_processed), np.int32)
            processed[:, -1 - NUM_RECENT] = NOT_PROCESSED
            if len(masks.processing):
                processed[places[masks.processing]] = masks.processed
        return HeldInputs(held, mask, asked, processed)

    def draw(
        self, samplers: Mapping[tuple[int, bool], CompiledSampler], state: DeviceState, *, inputs: HeldInputs
    ) -> tuple[DeviceState, StepOutput]:
        """Run the program that samples, after the step; the output has what is wanted of it."""
        logits, self.logits = self.logits, None
        sampler = samplers[self.packed.shape.num_singles, self.wants_evidence]
        state, output = sampler(state, logits, held=inputs)
        unwanted = {"top": not self.wants_top, "mask": not self.wants_mask}
        wanted = {name for name in output.columns if not unwanted.get(name)}
        return state, only_wanted(output, frozenset({"sampled_N3S", *wanted}))

    def complete(self, output: StepOutput) -> StepOutput:
        """Wait for the samples; the step's output with them."""
        assert self.drawn is not None, "a plan with masks follows one that holds its samples"
        drawn = self.drawn()
        return replace(output, sampled_N3S=drawn.sampled_N3S, columns=drawn.columns)


def held_of(packed: PackedStep, plan: StepPlan, *, processors: Sequence[LogitProcessor]) -> HeldSamples:
    """Return the deferred samples of a step; a server with `processors` gives them what is asked of them."""
    return HeldSamples(packed, "top_ids" in plan.columns, num_processed=processed_size(processors) if processors else 0)
