"""What devices remember of rows follows from the changes that plans bring, however many come at once."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from rayserve_moe.execution.step.pytrees import DeviceState
from rayserve_moe.execution.step.row_updates import (
    MAX_ENTRIES,
    MAX_NEW_ROWS,
    VECTOR_SIZE,
    apply_update,
    empty_vector,
    update_vectors,
)
from rayserve_moe.scheduling.step_plan import PageTableChanges, RowSampling, StepPlan
from tests.support.devices.rank_state import state_of_rows

LARGEST = 2**32 - 1
apply_compiled = jax.jit(apply_update)


def updated(rows: DeviceState, plan: StepPlan, *, data_rank: int = 0) -> DeviceState:
    for vector in update_vectors(plan, rows_per_rank=len(rows.last_tokens_R)):
        assert vector.shape == (VECTOR_SIZE,) and vector.dtype == np.int32
        rows = apply_compiled(rows, vector, data_rank=data_rank)
    return jax.tree.map(np.asarray, rows)


def changed(*entries: tuple[int, int, int]) -> PageTableChanges:
    return PageTableChanges(*np.asarray(entries, np.int32).reshape(-1, 3).T)


def sampling_of(*row_ids: int) -> RowSampling:
    floats = np.array([[0.5, 0.9, -0.0, 1.1, -2.0, 3.0]] * len(row_ids), np.float32)
    integers = np.array([[row, LARGEST, 2, 1, 20, 7] for row in row_ids], np.uint32)
    return RowSampling(np.asarray(row_ids), floats, integers)


def assert_same(actual: DeviceState, expected: DeviceState) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_only_what_a_plan_names_changes():
    rows = state_of_rows(3)
    found = updated(rows, StepPlan(0, pages=changed((1, 0, 70), (1, 1, 90), (2, 3, 40))))
    expected = rows.page_table_RP.copy()
    expected[[1, 1, 2], [0, 1, 3]] = 70, 90, 40
    assert_same(found, replace(rows, page_table_RP=expected))


def test_new_rows_bring_their_sampling_to_the_last_bit():
    found = updated(state_of_rows(3), StepPlan(0, sampling=sampling_of(2)))
    np.testing.assert_array_equal(found.sampling_floats_RF[2].view(np.int32), sampling_of(2).floats[0].view(np.int32))
    np.testing.assert_array_equal(found.sampling_integers_RI[2], [2, LARGEST, 2, 1, 20, 7])
    untouched = state_of_rows(3)
    np.testing.assert_array_equal(found.sampling_floats_RF[:2], untouched.sampling_floats_RF[:2])
    np.testing.assert_array_equal(found.last_tokens_R, untouched.last_tokens_R)


def test_each_data_rank_takes_what_is_its_own():
    plan = StepPlan(0, pages=changed((0, 1, 70), (5, 1, 80)), sampling=sampling_of(1, 4))
    first, second = (updated(state_of_rows(3), plan, data_rank=rank) for rank in (0, 1))
    assert first.page_table_RP[0, 1] == 70 and second.page_table_RP[2, 1] == 80
    assert (first.page_table_RP != state_of_rows(3).page_table_RP).sum() == 1
    assert (second.page_table_RP != state_of_rows(3).page_table_RP).sum() == 1
    assert first.sampling_integers_RI[:, 0].tolist() == [4, 1, 4]
    assert second.sampling_integers_RI[:, 0].tolist() == [4, 4, 4] and second.sampling_integers_RI[1, 1] == LARGEST


def test_a_plan_without_changes_needs_no_update_and_an_empty_one_changes_nothing():
    assert list(update_vectors(StepPlan(0), rows_per_rank=3)) == []
    rows = state_of_rows(3)
    assert_same(jax.tree.map(np.asarray, apply_compiled(rows, empty_vector(), data_rank=0)), rows)


def test_more_changes_than_one_update_holds_are_cut_into_several():
    num_rows, width = 2 * MAX_NEW_ROWS + 3, 20
    generator = np.random.default_rng(0)
    places = generator.permutation(num_rows * width)[: 2 * MAX_ENTRIES + 5]
    pages = PageTableChanges(*np.divmod(places, width), np.arange(1000, 1000 + len(places), dtype=np.int32))
    plan = StepPlan(0, pages=pages, sampling=sampling_of(*range(num_rows)))
    assert len(list(update_vectors(plan, rows_per_rank=num_rows))) == 3
    rows = state_of_rows(num_rows, page_table_RP=np.zeros((num_rows, width), np.int32))
    found = updated(rows, plan)
    rows.page_table_RP[pages.rows, pages.indices] = pages.page_ids
    rows.sampling_floats_RF[:], rows.sampling_integers_RI[:] = plan.sampling.floats, plan.sampling.integers
    assert_same(found, rows)
