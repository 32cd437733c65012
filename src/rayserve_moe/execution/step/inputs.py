"""The one vector per data rank that a step is called with: its sections, and what the device makes of them."""

# S single tokens, and sampled rows   B prefill blocks   Q tokens per block   C page changes   R rows   T tokens
# F, I sampling parameters

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.decoding.adjustment import Penalties
from rayserve_moe.decoding.sampling import SamplingBatch
from rayserve_moe.decoding.truncation import Limits
from rayserve_moe.execution.step.pytrees import DeviceState, DraftState, StepShape
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.kv_pool import LayerPages
from rayserve_moe.scheduling.step_plan import AWAITED, DRAFTED, LAST_SAMPLED, RowFloats, RowIntegers


class Sections(NamedTuple):
    """The int32 sections of the vector, in its order; of lengths S, S, S, B, B, B, B * Q, S, S, C, C, C, B or 0.

    A single token has a row, a position (-1: padding) and an id; a block a row, the position of its first token and
    how many of its tokens are real; a sample the place (in T) that it is taken after, and its row; a change of the
    page table a row, an index and a page; the next of a block is the known token behind its last, or -1. Rows are the
    data rank's own; a row that does not exist marks padding.
    """

    single_rows: slice
    single_positions: slice
    single_ids: slice
    block_rows: slice
    block_starts: slice
    block_counts: slice
    block_ids: slice
    sample_places: slice
    sample_rows: slice
    change_rows: slice
    change_indices: slice
    change_pages: slice
    block_nexts: slice


class DeviceInput(NamedTuple):
    """A step's tokens, where samples are taken (places in T) and for which rows, how, and by what they are adjusted.

    `block_nexts_B`: the known tokens behind blocks, -1: none, if a draft model wants them.
    """

    batch: TokenBatch
    sample_places_S: jax.Array
    sample_rows_S: jax.Array
    sampling: SamplingBatch
    penalties: Penalties
    block_nexts_B: jax.Array


@dataclass(frozen=True)
class InputLayout:
    """Where the sections of a step of `shape` lie, for ranks with `num_rows` rows and `num_tables` tables of pages.

    `tells_nexts`: a draft model wants to know what follows a block. `most_together`: of `TokenBatch`. `num_columns`:
    values of states behind the page tables of a row.
    """

    shape: StepShape
    num_rows: int
    num_tables: int = 1
    tells_nexts: bool = False
    most_together: int = 1
    num_columns: int = 0

    @cached_property
    def slices(self) -> Sections:
        singles, blocks = self.shape.num_singles, self.shape.num_blocks
        changes = self.num_changes
        sizes = (
            *[singles] * 3,
            *[blocks] * 3,
            blocks * self.shape.block_tokens,
            *[singles] * 2,
            *[changes] * 3,
            blocks * self.tells_nexts,
        )
        borders = accumulate(sizes, initial=0)
        return Sections(*(slice(*border) for border in pairwise(borders)))

    @property
    def num_changes(self) -> int:
        """Page-table entries that fit into the vector: one per row that decodes, and table; prompts send theirs
        ahead."""
        return 0 if self.shape.num_blocks else self.shape.num_singles * self.num_tables

    @cached_property
    def padding(self) -> np.ndarray:
        """The vector of a step that does nothing, int32 [W]."""
        vector = np.zeros(self.slices.block_nexts.stop, np.int32)
        vector[self.slices.block_nexts] = -1
        vector[self.slices.single_positions] = -1
        vector[self.slices.sample_rows] = self.num_rows
        vector[self.slices.change_rows] = self.num_rows
        return vector


@jax.named_scope("row_update")
def change_pages(state: DeviceState, vector_W: jax.Array, *, layout: InputLayout) -> jax.Array:
    """On one device: the page table with the changes that came with a step."""
    at = layout.slices
    entries = (vector_W[at.change_rows], vector_W[at.change_indices])
    return state.page_table_RP.at[entries].set(vector_W[at.change_pages], mode="drop")


@jax.named_scope("unpack")
def unpack(
    vector_W: jax.Array,
    state: DeviceState,
    *,
    layout: InputLayout,
    page_size: int,
    layer_pages: tuple[LayerPages, ...] = (),
) -> DeviceInput:
    """On one device: the step that `vector_W` and its rows describe; the page table is up to date already."""
    at, shape = layout.slices, layout.shape
    block_rows = vector_W[at.block_rows]
    offsets_BQ = jnp.broadcast_to(jnp.arange(shape.block_tokens), (shape.num_blocks, shape.block_tokens))
    is_real_BQ = offsets_BQ < vector_W[at.block_counts][:, None]
    block_positions = jnp.where(is_real_BQ, vector_W[at.block_starts][:, None] + offsets_BQ, -1).reshape(-1)
    single_positions = vector_W[at.single_positions]
    positions_T = jnp.concatenate([single_positions, block_positions])
    single_rows, single_ids = vector_W[at.single_rows], vector_W[at.single_ids]
    single_ids = jnp.where(single_ids == LAST_SAMPLED, state.last_tokens_R[single_rows], single_ids)
    if state.draft is not None:
        single_positions, single_ids = _awaited(state.draft, single_rows, single_positions, single_ids)
        positions_T = jnp.concatenate([single_positions, block_positions])
    rows_B = jnp.concatenate([single_rows, block_rows])
    page_table_BP, entries_B3 = state.page_table_RP[rows_B], None
    if layout.num_columns:
        page_table_BP, entries_B3 = page_table_BP[:, : -layout.num_columns], page_table_BP[:, -layout.num_columns :]
    if layer_pages:
        page_table_BP = jnp.moveaxis(page_table_BP.reshape(len(page_table_BP), -1, layout.num_tables), -1, 0)
    block_of_T = jnp.concatenate(
        [
            jnp.arange(shape.num_singles),
            shape.num_singles + jnp.repeat(jnp.arange(shape.num_blocks), shape.block_tokens),
        ]
    )
    pages_T = page_table_BP[..., block_of_T, positions_T // page_size]
    slots_T = jnp.where(positions_T >= 0, pages_T * page_size + positions_T % page_size, 0)
    ids_T = jnp.concatenate([single_ids, vector_W[at.block_ids]])
    batch = TokenBatch(
        ids_T,
        positions_T,
        slots_T,
        page_table_BP,
        shape.num_singles,
        layer_pages,
        rows_B=rows_B,
        entries_B3=entries_B3,
    )
    if layout.most_together > 1:
        batch = replace(batch, sequences_U=single_rows, most_together=layout.most_together)
    places_S, rows_S = vector_W[at.sample_places], vector_W[at.sample_rows]
    sampling, penalties = sampling_of(state, rows_S, positions_S=positions_T[places_S] + 1)
    nexts_B = vector_W[at.block_nexts]
    return DeviceInput(batch, places_S, rows_S, sampling, penalties, nexts_B)


def _awaited(
    draft: DraftState, rows_S: jax.Array, positions_S: jax.Array, ids_S: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Positions and ids of single tokens, those that the plan awaits by what rows have computed and have for drafts."""
    depths_S = AWAITED - positions_S
    ahead_S = draft.positions_R[rows_S] + 1 + depths_S
    drafts_S = draft.drafts_RK[rows_S, jnp.maximum(depths_S - 1, 0)]
    return jnp.where(depths_S >= 0, ahead_S, positions_S), jnp.where(ids_S == DRAFTED, drafts_S, ids_S)


def sampling_of(state: DeviceState, rows_S: jax.Array, *, positions_S: jax.Array) -> tuple[SamplingBatch, Penalties]:
    """How each sample of `rows_S` at `positions_S` is drawn, and by what it is adjusted; padding is greedy and adjusts
    nothing."""
    is_real_S = rows_S < state.last_tokens_R.shape[0]
    floats = RowFloats(*jnp.where(is_real_S[:, None], state.sampling_floats_RF[rows_S], jnp.array(RowFloats())).T)
    integers = RowIntegers(*jnp.where(is_real_S[:, None], state.sampling_integers_RI[rows_S], 0).T)
    sampling = SamplingBatch(
        temperature_S=floats.temperature,
        limits=Limits(
            top_k_S=integers.top_k,
            top_p_S=floats.top_p,
            min_p_S=floats.min_p,
        ),
        seed_S=integers.seed,
        choice_S=integers.choice,
        position_S=positions_S.astype(jnp.uint32),
        num_top_S=integers.num_top,
    )
    penalties = (floats.repetition_penalty, floats.presence_penalty, floats.frequency_penalty)
    withholds_S = sampling.position_S < integers.first_end
    return sampling, Penalties((integers.adjusts > 0) | withholds_S, *penalties, withholds_S)
