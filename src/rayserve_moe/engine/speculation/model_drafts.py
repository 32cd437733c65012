"""Proposer for draft models, whose drafts arrive with the result of the step that they follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayserve_moe.config.settings import DRAFT_MODELS, SpeculationSettings
from rayserve_moe.engine.speculation.proposers import PROPOSERS, Proposer
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult

NO_DRAFTS = np.zeros(0, np.int32)


def with_drafting(schedule: Schedule, table: RowTable, *, wants_drafts: bool) -> Schedule:
    """Return the schedule with drafting on or off, and the tokens that follow prompt chunks for the draft model."""
    plan, has_blocks, next_ids = schedule.plan, schedule.plan.has_blocks, None
    if not has_blocks and plan.wants_drafts == wants_drafts:
        return schedule
    if has_blocks:
        chunks = plan.chunks
        next_ids = np.full(plan.num_chunks, -1, np.int32)
        ends = chunks.starts + chunks.lengths
        for chunk in np.flatnonzero(~chunks.samples).tolist():
            sequence = table.sequences[chunks.rows[chunk]]
            if sequence is not None and ends[chunk] < sequence.num_tokens:
                next_ids[chunk] = sequence.token_ids[ends[chunk]]
    return replace(schedule, plan=replace(plan, wants_drafts=wants_drafts, next_ids=next_ids))


class ModelProposer:
    """Proposer that keeps the drafts of a draft model until their sequence has more tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._kept: dict[int, tuple[int, np.ndarray]] = {}

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Return the drafts after the last token of a sequence, if any."""
        num_tokens, drafts = self._kept.get(id(sequence), (0, NO_DRAFTS))
        return drafts[:count] if num_tokens == sequence.num_tokens else NO_DRAFTS

    def end(self, sequence: Sequence) -> None:
        """Drop the drafts of a sequence."""
        self._kept.pop(id(sequence), None)

    def keep(self, schedule: Schedule, result: StepResult, *, table: RowTable) -> None:
        """Keep the drafts of a step whose samples are committed."""
        if result.drafts is None:
            return
        rows = schedule.sampling_rows
        is_first = np.concatenate([[True], rows[1:] != rows[:-1]])
        for row, drafts in zip(rows[is_first].tolist(), result.drafts, strict=True):
            sequence = table.sequences[row]
            if sequence is not None and sequence.finish is None:
                self._kept[id(sequence)] = sequence.num_tokens, drafts


def proposer_for(settings: SpeculationSettings) -> Proposer:
    """Return the proposer of `speculative_algorithm`."""
    if settings.algorithm in DRAFT_MODELS:
        return ModelProposer(settings.algorithm.lower())
    return PROPOSERS[settings.algorithm](settings)
