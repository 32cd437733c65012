"""What hosts remember of rows follows from the changes that plans bring."""

from __future__ import annotations

import numpy as np

from rayserve_moe.execution.row_state import RowState
from rayserve_moe.scheduling.step_plan import PageTableChanges, RowSampling, StepPlan


def changed(*entries: tuple[int, int, int]) -> PageTableChanges:
    return PageTableChanges(*np.asarray(entries, np.int32).reshape(-1, 3).T)


def test_only_what_a_plan_names_changes():
    rows = RowState(num_rows=3, pages_per_row=4, page_size=8)
    rows.apply(StepPlan(0, pages=changed((1, 0, 7), (1, 1, 9), (2, 3, 4))))
    rows.apply(StepPlan(1, pages=changed((1, 1, 5))))
    np.testing.assert_array_equal(rows.page_table, [[0, 0, 0, 0], [7, 5, 0, 0], [0, 0, 0, 4]])
    before = rows.page_table.copy()
    rows.apply(StepPlan(2))
    np.testing.assert_array_equal(rows.page_table, before)


def test_sampling_stays_with_a_row_until_its_next_owner():
    rows = RowState(num_rows=2, pages_per_row=1, page_size=8)
    largest = 2**32 - 1
    sampling = RowSampling(
        np.array([1]), np.array([[0.5, 0.9, 0.1]], np.float32), np.array([[3, largest, 2]], np.uint32)
    )
    rows.apply(StepPlan(0, sampling=sampling))
    rows.apply(StepPlan(1))
    np.testing.assert_array_equal(rows.sampling_floats[1], np.array([0.5, 0.9, 0.1], np.float32))
    np.testing.assert_array_equal(rows.sampling_integers, [[0, 0, 0], [3, largest, 2]])


def test_a_slot_is_a_place_in_the_page_of_its_position():
    rows = RowState(num_rows=2, pages_per_row=3, page_size=4)
    rows.apply(StepPlan(0, pages=changed((0, 0, 5), (0, 2, 6), (1, 1, 2))))
    slots = rows.kv_slots(np.array([0, 0, 0, 1, 1]), np.array([0, 3, 9, 4, 7]))
    np.testing.assert_array_equal(slots, [20, 23, 25, 8, 11])
