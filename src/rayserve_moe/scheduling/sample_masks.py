"""Which words the samples of a step may be, where their sequences are guided."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rayserve_moe.requests import FinishReason
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import SampleMasks

Ending = tuple[Sequence, FinishReason]


def sample_masks(table: RowTable, schedule: Schedule) -> tuple[SampleMasks, list[Ending]]:
    """Masks for the samples of a step that holds them, and the sequences that cannot go on, with the reason.

    All tokens before the step must have been committed. Samples of rows with another owner by now may be any word.
    """
    samples, bits, endings = [], [], []
    for sample, sequence in _guided(table, schedule):
        assert sequence.guide is not None, "only guided sequences have masks"
        outputs = sequence.token_ids[sequence.num_prompt_tokens : sequence.num_tokens]
        mask = sequence.guide.next_mask(outputs)
        if isinstance(mask, FinishReason):
            endings.append((sequence, mask))
        else:
            samples.append(sample)
            bits.append(mask)
    stacked = np.stack(bits) if bits else np.zeros((0, 0), np.int32)
    return SampleMasks(np.asarray(samples, np.intp), stacked), endings


def _guided(table: RowTable, schedule: Schedule) -> Iterator[tuple[int, Sequence]]:
    """The samples of a step whose rows are guided and have the owner that they had, with their sequences."""
    rows = schedule.sampling_rows
    is_own = table.generations[rows] == schedule.sampling_generations
    for sample in np.flatnonzero(table.is_guided[rows] & is_own).tolist():
        sequence = table.sequences[rows[sample]]
        assert sequence is not None, "a guided row has a sequence"
        yield sample, sequence
