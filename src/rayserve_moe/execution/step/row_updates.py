"""Larger changes of rows on the devices: new owners, page tables of prompts, and logit adjustments."""

# U page-table entries   V new rows, of X fields each   F, I sampling parameters   R rows   P page-table width
# Of an adjustment: N token ids of one vector   B biases   V vocabulary (local share)

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.decoding.adjustment import record_known_tokens
from rayserve_moe.execution.step.pytrees import DeviceState
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from rayserve_moe.requests.fields import MAX_LOGIT_BIASES
from rayserve_moe.scheduling.step_plan import MAX_WITHHELD_IDS, NUM_FLOATS, NUM_INTEGERS, RowAdjustment, StepPlan

MAX_ENTRIES = 1024
MAX_NEW_ROWS = 64
ENTRY_FIELDS = 4
ROW_FIELDS = 2 + NUM_FLOATS + NUM_INTEGERS
VECTOR_SIZE = MAX_ENTRIES * ENTRY_FIELDS + MAX_NEW_ROWS * ROW_FIELDS
"""Size of a vector of changes. An entry has rank, row, index and page.

A new row has rank, row, floats as bits and integers.

A rank of -1 marks padding. Rows are the rank's own.
"""

HEADER_FIELDS = 6
MAX_IDS = 4096
MAX_BIASES = MAX_LOGIT_BIASES + MAX_WITHHELD_IDS
ADJUSTMENT_SIZE = HEADER_FIELDS + MAX_IDS + 2 * MAX_BIASES
"""Size of a vector that adjusts a row.

The header has rank, row, whether it is the row's first vector, and the numbers of prompt ids, ids and biases.

The ids follow, then the ids of biases, then their values as bits. A rank of -1 marks padding. The row is the rank's
own.
"""


Update = Callable[[DeviceState, np.ndarray], DeviceState]


def update_vectors(plan: StepPlan, *, rows_per_rank: int) -> Iterator[np.ndarray]:
    """Yield the changes of a plan as vectors int32 [VECTOR_SIZE]."""
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


def updates_of(
    plan: StepPlan, changes: tuple[Update, Update], *, rows_per_rank: int
) -> Iterator[tuple[Update, np.ndarray]]:
    """Yield the programs of `changes` (rows, adjustments) that run before a step, with their vectors."""
    update, adjust = changes
    for vector in update_vectors(plan, rows_per_rank=rows_per_rank):
        yield update, vector
    for adjustment in plan.adjustments:
        for vector in adjustment_vectors(adjustment, rows_per_rank=rows_per_rank):
            yield adjust, vector


def empty_vector() -> np.ndarray:
    """Return a vector without changes."""
    vector = np.zeros(VECTOR_SIZE, np.int32)
    vector[: MAX_ENTRIES * ENTRY_FIELDS : ENTRY_FIELDS] = -1
    vector[MAX_ENTRIES * ENTRY_FIELDS :: ROW_FIELDS] = -1
    return vector


def apply_update(state: DeviceState, vector: jax.Array, *, data_rank: jax.Array) -> DeviceState:
    """Apply the changes for this data rank, on a device."""
    entries_U4 = vector[: MAX_ENTRIES * ENTRY_FIELDS].reshape(MAX_ENTRIES, ENTRY_FIELDS)
    new_VX = vector[MAX_ENTRIES * ENTRY_FIELDS :].reshape(MAX_NEW_ROWS, ROW_FIELDS)
    nowhere = state.last_tokens_R.shape[0]
    rows_U = jnp.where(entries_U4[:, 0] == data_rank, entries_U4[:, 1], nowhere)
    rows_V = jnp.where(new_VX[:, 0] == data_rank, new_VX[:, 1], nowhere)
    floats_VF = jax.lax.bitcast_convert_type(new_VX[:, 2 : 2 + NUM_FLOATS], jnp.float32)
    integers_VI = jax.lax.bitcast_convert_type(new_VX[:, 2 + NUM_FLOATS :], jnp.uint32)
    return replace(
        state,
        page_table_RP=state.page_table_RP.at[rows_U, entries_U4[:, 2]].set(entries_U4[:, 3], mode="drop"),
        sampling_floats_RF=state.sampling_floats_RF.at[rows_V].set(floats_VF, mode="drop"),
        sampling_integers_RI=state.sampling_integers_RI.at[rows_V].set(integers_VI, mode="drop"),
    )


def adjustment_vectors(adjustment: RowAdjustment, *, rows_per_rank: int) -> Iterator[np.ndarray]:
    """Yield a row's adjustments as vectors int32 [ADJUSTMENT_SIZE]; the first resets the row."""
    token_ids = np.concatenate([adjustment.prompt_ids, adjustment.output_ids])
    num_prompt, num_biases = len(adjustment.prompt_ids), len(adjustment.bias_ids)
    rank, row = divmod(adjustment.row, rows_per_rank)
    for first in range(0, max(len(token_ids), 1), MAX_IDS):
        ids = token_ids[first : first + MAX_IDS]
        vector = no_adjustment()
        vector[:HEADER_FIELDS] = rank, row, first == 0, min(max(num_prompt - first, 0), len(ids)), len(ids), num_biases
        vector[HEADER_FIELDS : HEADER_FIELDS + len(ids)] = ids
        bias_ids, bias_values = vector[HEADER_FIELDS + MAX_IDS :].reshape(2, -1)
        bias_ids[:num_biases] = adjustment.bias_ids
        bias_values[:num_biases] = adjustment.bias_values.view(np.int32)
        yield vector


def no_adjustment() -> np.ndarray:
    """Return a vector without changes."""
    vector = np.zeros(ADJUSTMENT_SIZE, np.int32)
    vector[0] = -1
    return vector


def apply_adjustment(state: DeviceState, vector: jax.Array, *, part: VocabularyPart) -> DeviceState:
    """Apply the adjustments of a row of any data rank, on a device, for the ids of the device's shard."""
    rank, row, is_first, num_prompt, num_known, num_biases = vector[:HEADER_FIELDS]
    num_rows = len(state.seen_RV)
    row = jnp.where(rank >= 0, rank * len(state.last_tokens_R) + row, num_rows)
    before_V = jnp.where(is_first > 0, 0, state.seen_RV.at[row].get(mode="clip"))
    places_N = part.places(vector[HEADER_FIELDS : HEADER_FIELDS + MAX_IDS])
    seen_V = record_known_tokens(before_V, places_N, num_prompt=num_prompt, num_known=num_known)
    ids_B, bits_B = vector[HEADER_FIELDS + MAX_IDS :].reshape(2, MAX_BIASES)
    ids_B = jnp.where(jnp.arange(MAX_BIASES) < num_biases, ids_B, part.num_words)
    values_B = jax.lax.bitcast_convert_type(bits_B, jnp.float32)
    return replace(
        state,
        seen_RV=state.seen_RV.at[row].set(seen_V, mode="drop"),
        bias_ids_RB=state.bias_ids_RB.at[row].set(ids_B, mode="drop"),
        bias_values_RB=state.bias_values_RB.at[row].set(values_B, mode="drop"),
    )
