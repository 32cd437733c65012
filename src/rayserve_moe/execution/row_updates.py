"""Bringing larger changes of rows to the devices: new owners, and page tables of prompts."""

# U page-table entries   V new rows, of X fields each   F, I sampling parameters   R rows   P page-table width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.execution.step_types import RowState
from rayserve_moe.scheduling.step_plan import NUM_FLOATS, NUM_INTEGERS, StepPlan

MAX_ENTRIES = 1024
MAX_NEW_ROWS = 64
ENTRY_FIELDS = 4
ROW_FIELDS = 2 + NUM_FLOATS + NUM_INTEGERS
VECTOR_SIZE = MAX_ENTRIES * ENTRY_FIELDS + MAX_NEW_ROWS * ROW_FIELDS
"""A vector of changes: per entry rank, row, index, page; per new row rank, row, its floats as bits, its integers.

A rank of -1 marks padding. Rows are the rank's own.
"""


def update_vectors(plan: StepPlan, *, rows_per_rank: int) -> Iterator[np.ndarray]:
    """Cut the changes of a plan into vectors int32 [VECTOR_SIZE]."""
    pages, sampling = plan.pages, plan.sampling
    entries = np.stack([*np.divmod(pages.rows, rows_per_rank), pages.indices, pages.page_ids], axis=1)
    new_rows = np.concatenate(
        [
            np.stack(np.divmod(sampling.rows, rows_per_rank), axis=1),
            sampling.floats.view(np.int32),
            sampling.integers.view(np.int32),
        ],
        axis=1,
    )
    num_vectors = max(-(-len(entries) // MAX_ENTRIES), -(-len(new_rows) // MAX_NEW_ROWS))
    for i in range(num_vectors):
        some_entries = entries[i * MAX_ENTRIES : (i + 1) * MAX_ENTRIES]
        some_rows = new_rows[i * MAX_NEW_ROWS : (i + 1) * MAX_NEW_ROWS]
        vector = empty_vector()
        vector[: some_entries.size] = some_entries.reshape(-1)
        first = MAX_ENTRIES * ENTRY_FIELDS
        vector[first : first + some_rows.size] = some_rows.reshape(-1)
        yield vector


def empty_vector() -> np.ndarray:
    """A vector that changes nothing."""
    vector = np.zeros(VECTOR_SIZE, np.int32)
    vector[: MAX_ENTRIES * ENTRY_FIELDS : ENTRY_FIELDS] = -1
    vector[MAX_ENTRIES * ENTRY_FIELDS :: ROW_FIELDS] = -1
    return vector


def apply_update(rows: RowState, vector: jax.Array, *, data_rank: jax.Array) -> RowState:
    """On one device: take over the changes that are this data rank's."""
    entries_U4 = vector[: MAX_ENTRIES * ENTRY_FIELDS].reshape(MAX_ENTRIES, ENTRY_FIELDS)
    new_VX = vector[MAX_ENTRIES * ENTRY_FIELDS :].reshape(MAX_NEW_ROWS, ROW_FIELDS)
    nowhere = rows.last_tokens_R.shape[0]
    rows_U = jnp.where(entries_U4[:, 0] == data_rank, entries_U4[:, 1], nowhere)
    rows_V = jnp.where(new_VX[:, 0] == data_rank, new_VX[:, 1], nowhere)
    floats_VF = jax.lax.bitcast_convert_type(new_VX[:, 2 : 2 + NUM_FLOATS], jnp.float32)
    integers_VI = jax.lax.bitcast_convert_type(new_VX[:, 2 + NUM_FLOATS :], jnp.uint32)
    return replace(
        rows,
        page_table_RP=rows.page_table_RP.at[rows_U, entries_U4[:, 2]].set(entries_U4[:, 3], mode="drop"),
        sampling_floats_RF=rows.sampling_floats_RF.at[rows_V].set(floats_VF, mode="drop"),
        sampling_integers_RI=rows.sampling_integers_RI.at[rows_V].set(integers_VI, mode="drop"),
    )
