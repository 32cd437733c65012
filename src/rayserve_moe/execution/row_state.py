"""What a host remembers of every row between steps, so that plans carry changes only."""

from __future__ import annotations

import numpy as np

from rayserve_moe.scheduling.step_plan import StepPlan


class RowState:
    """Page table int32 [rows, pages per row] and sampling parameters [rows, 3] of the sequences in their rows."""

    def __init__(self, *, num_rows: int, pages_per_row: int, page_size: int) -> None:
        self.page_size = page_size
        self.page_table = np.zeros((num_rows, pages_per_row), np.int32)
        self.sampling_floats = np.zeros((num_rows, 3), np.float32)
        self.sampling_integers = np.zeros((num_rows, 3), np.uint32)

    def apply(self, plan: StepPlan) -> None:
        """Take over the changes a plan brings."""
        self.page_table[plan.pages.rows, plan.pages.indices] = plan.pages.page_ids
        self.sampling_floats[plan.sampling.rows] = plan.sampling.floats
        self.sampling_integers[plan.sampling.rows] = plan.sampling.integers

    def kv_slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slot (page * page_size + offset) of each position of its row."""
        pages = self.page_table[rows, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size
