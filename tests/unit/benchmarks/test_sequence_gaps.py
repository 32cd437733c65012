"""Gaps of sequences are counted in steps, whatever a step takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.engine_runs import SequenceGaps
from rayserve_moe.scheduling.step_plan import Chunks, StepPlan


def plan(*chunks: tuple[int, int, int]) -> StepPlan:
    """Return a plan of chunks: row, first position and length."""
    rows, starts, lengths = (
        (np.array(each, np.intp) for each in zip(*chunks, strict=True)) if chunks else [np.zeros(0)] * 3
    )
    return StepPlan(0, Chunks(rows, starts, lengths))


def test_a_sequence_that_waits_has_a_gap_and_a_new_one_in_its_row_has_none():
    ran: list[Any] = []
    engine: Any = SimpleNamespace(runner=SimpleNamespace(execute=ran.append))
    gaps = SequenceGaps(engine)
    plans = [
        plan((0, 0, 5), (1, 0, 3)),
        plan((0, 5, 1), (1, 3, 1)),
        plan(),  # no step
        plan((0, 6, 1)),
        plan((0, 7, 1)),
        plan((1, 4, 1), (0, 2, 9)),  # row 1 waited two steps, row 0 has another sequence
    ]
    for each in plans:
        engine.runner.execute(each)
    assert ran == plans
    assert gaps.counts == {1: 4, 3: 1}
