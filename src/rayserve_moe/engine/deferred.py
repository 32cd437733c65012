"""Deferred samples: token masks and requested evidence for the samples of a step, filled in while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rayserve_moe.engine.extension import StepExtension
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.processor_arguments import NUM_RECENT
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import SampleMasks

Ending = tuple[Sequence, FinishReason]
BUDGET_MS = 30.0
"""Budget for the masks of a step, which all running requests wait for. Beyond it no further mask is begun."""
OVER_BUDGET = FinishReason(
    "error", message="the constraints that run at once take too long, this one most of all", source="constraint"
)


class DeferredSampling(StepExtension):
    """Gives every plan the masks for the deferred samples of the step in flight.

    All tokens before that step have been committed, so that guides know them.
    """

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._seconds = 0.0

    def plan(self, schedule: Schedule, before: Schedule | None) -> Schedule:
        """Add masks for the samples of `before`, and the endings of sequences that cannot go on."""
        if before is None or not before.plan.holds_samples:
            return schedule
        started = time.perf_counter()
        masks, endings = sample_masks(self._table, before)
        self._seconds += time.perf_counter() - started
        return replace(schedule, plan=replace(schedule.plan, masks=masks), endings=tuple(endings))

    def statistics(self) -> dict[str, float]:
        """Return the seconds spent on masks."""
        return {"mask_s": self._seconds}


def sample_masks(table: RowTable, schedule: Schedule) -> tuple[SampleMasks, list[Ending]]:
    """Return masks and requested evidence for the deferred samples of a step, and the sequences that cannot go on.

    All tokens before the step must have been committed. Samples of rows with another owner by now may be any token.
    The fastest guides come first, so that those beyond the budget are the slow ones.
    """
    samples, bits, endings, spent_ms = [], [], [], 0.0
    held = list(_held(table, schedule))
    guided = [(sample, sequence, guide) for sample, sequence in held if (guide := sequence.rules.guide) is not None]
    for sample, sequence, guide in sorted(guided, key=lambda each: each[2].last_ms):
        outputs = sequence.token_ids[sequence.num_prompt_tokens : sequence.num_tokens]
        mask = guide.next_mask(outputs) if spent_ms < BUDGET_MS else OVER_BUDGET
        spent_ms += guide.last_ms
        if isinstance(mask, FinishReason):
            endings.append((sequence, mask))
        else:
            samples.append(sample)
            bits.append(mask)
    stacked = np.stack(bits) if bits else np.zeros((0, 0), np.int32)
    masks = SampleMasks(np.asarray(samples, np.intp), stacked)
    asking = [(sample, asked) for sample, sequence in held if (asked := sequence.rules.asked) is not None]
    if asking:
        of_samples, asked = zip(*asking, strict=True)
        masks = replace(masks, asking=np.asarray(of_samples, np.intp), asked=np.stack(asked))
    processing = [
        (sample, _processed(sequence, given))
        for sample, sequence in held
        if (given := sequence.rules.processed) is not None
    ]
    if processing:
        of_samples, given = zip(*processing, strict=True)
        masks = replace(masks, processing=np.asarray(of_samples, np.intp), processed=np.stack(given))
    return masks, endings


def _processed(sequence: Sequence, given: np.ndarray) -> np.ndarray:
    """Return the input of processors for a sequence: arguments of its request, number of outputs, latest tokens."""
    recent = np.full(NUM_RECENT, -1, np.int32)
    known = sequence.token_ids[max(0, sequence.num_tokens - NUM_RECENT) : sequence.num_tokens]
    recent[NUM_RECENT - len(known) :] = known
    return np.concatenate([given, np.array([sequence.num_outputs], np.int32), recent])


def _held(table: RowTable, schedule: Schedule) -> Iterator[tuple[int, Sequence]]:
    """Yield the deferred samples of a step whose rows still have their owner, with their sequences."""
    rows = schedule.sampling_rows
    is_own = table.generations[rows] == schedule.sampling_generations
    for sample in np.flatnonzero(table.wants.are_held[rows] & is_own).tolist():
        sequence = table.sequences[rows[sample]]
        assert sequence is not None, "a row whose samples are held has a sequence"
        yield sample, sequence
