"""Masks of a step: of rows that still have their owner, within a budget that cheap guides come first in."""

from __future__ import annotations

import numpy as np

from rayserve_moe.engine.guides import BUDGET_MS, OVER_BUDGET, sample_masks
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepPlan
from tests.support.engine.workload import request_for

END = FinishReason("stop")


class TimedGuide:
    """Allows the word of its own number; takes `costs_ms`, which it does not know before."""

    def __init__(self, number: int, *, last_ms: float = 0.0, costs_ms: float = 0.0, ends: bool = False) -> None:
        self.last_ms, self._costs_ms, self._number, self._ends = last_ms, costs_ms, number, ends

    def next_mask(self, output_ids: np.ndarray) -> np.ndarray | FinishReason:
        self.last_ms = self._costs_ms
        return END if self._ends else np.array([1 << self._number], np.int32)


def step_of(guides: list[TimedGuide | None]) -> tuple[RowTable, Schedule, list[Sequence]]:
    """A step that samples a row for each guide."""
    table = RowTable(num_rows=len(guides), max_tokens=8, page_size=4)
    sequences = [
        Sequence(request_for([3, 4], max_new_tokens=4), 0, seed=0, stop_token_ids=frozenset(), guide=g) for g in guides
    ]
    for row, sequence in enumerate(sequences):
        table.take(row, sequence)
    rows = np.arange(len(guides))
    return table, Schedule(StepPlan(0, holds_samples=True), rows, table.generations[rows], 0), sequences


def test_every_guided_row_has_its_own_bits_and_others_have_none():
    table, schedule, _ = step_of([TimedGuide(1), None, TimedGuide(2)])
    masks, endings = sample_masks(table, schedule)
    assert {int(sample): int(bits[0]) for sample, bits in zip(masks.samples, masks.bits, strict=True)} == {0: 2, 2: 4}
    assert not endings


def test_rows_that_were_left_have_no_mask():
    table, schedule, sequences = step_of([TimedGuide(1), TimedGuide(2)])
    table.leave(sequences[0])
    masks, endings = sample_masks(table, schedule)
    assert masks.samples.tolist() == [1] and not endings


def test_what_nothing_may_follow_ends():
    table, schedule, sequences = step_of([TimedGuide(1, ends=True), TimedGuide(2)])
    masks, endings = sample_masks(table, schedule)
    assert masks.samples.tolist() == [1] and endings == [(sequences[0], END)]


def test_the_slow_ones_pay_for_a_step_that_is_over_its_budget():
    slow = [TimedGuide(i, last_ms=9, costs_ms=0.4 * BUDGET_MS) for i in range(5)]
    table, schedule, sequences = step_of([*slow, *(TimedGuide(i, last_ms=0.1, costs_ms=0.1) for i in range(5, 9))])
    masks, endings = sample_masks(table, schedule)
    assert set(range(5, 9)) <= set(masks.samples.tolist()) and len(masks.samples) == 4 + 3
    assert [reason for _, reason in endings] == [OVER_BUDGET] * 2
    assert all(sequence in sequences[:5] for sequence, _ in endings)
