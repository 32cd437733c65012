"""Input vector of a step, a single int32 vector per data rank: its sections, and unpacking on the device."""

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
from rayserve_moe.kernels.adapters import TokenAdapters
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.kv_pool import StatePages
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.states import entry_states
from rayserve_moe.scheduling.step_plan import AWAITED, DRAFTED, LAST_SAMPLED, RowFloats, RowIntegers
from rayserve_moe.state.entries import ENTRY_COLUMNS


class Sections(NamedTuple):
    """Sections of the int32 vector, in order. Rows are the data rank's own; a row that does not exist marks padding."""

    single_rows: slice
    """Row of each single token, [S]."""
    single_positions: slice
    """Position of each single token, [S]; -1 marks padding."""
    single_ids: slice
    """Id of each single token, [S]."""
    block_rows: slice
    """Row of each block, [B]."""
    block_starts: slice
    """Position of each block's first token, [B]."""
    block_counts: slice
    """Number of real tokens of each block, [B]."""
    block_ids: slice
    """Token ids of blocks, [B * Q]."""
    sample_places: slice
    """Index in T of the token that each sample is taken after, [S]."""
    sample_rows: slice
    """Row of each sample, [S]."""
    change_rows: slice
    """Row of each page table change, [C]."""
    change_indices: slice
    """Index of each page table change, [C]."""
    change_pages: slice
    """Page of each page table change, [C]."""
    block_nexts: slice
    """Known token after each block, [B] or [0]; -1 if unknown."""
    adapter_slots: slice
    """Place of each adapter of the step among the resident ones, [N] or [0]."""
    adapter_places: slice
    """Index among them of the adapter of each single token and block, [S + B] or [0]; -1 for none."""


class DeviceInput(NamedTuple):
    """Unpacked input of a step."""

    batch: TokenBatch
    sample_places_S: jax.Array
    """Indices in T of the tokens that samples are taken after."""
    sample_rows_S: jax.Array
    """Rows of samples."""
    sampling: SamplingBatch
    penalties: Penalties
    block_nexts_B: jax.Array
    """Known token after each block, -1 for none, if a draft model needs them."""
    adapters: TokenAdapters | None = None
    """Adapters of tokens; None if steps of the shape have none."""


def num_columns(config: ModelConfig) -> int:
    """Return the number of state values of a row after its page tables."""
    return ENTRY_COLUMNS * len(entry_states(config))


@dataclass(frozen=True)
class InputLayout:
    """Layout of the input vector for steps of a shape."""

    shape: StepShape
    num_rows: int
    """Rows of a data rank."""
    num_tables: int = 1
    """Page tables of a row."""
    tells_nexts: bool = False
    """True if a draft model needs the token after each block."""
    max_together: int = 1
    """As in `TokenBatch`."""
    num_columns: int = 0
    """State values of a row after its page tables."""

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
            self.shape.num_adapters,
            (singles + blocks) * bool(self.shape.num_adapters),
        )
        borders = accumulate(sizes, initial=0)
        return Sections(*(slice(*border) for border in pairwise(borders)))

    @property
    def num_changes(self) -> int:
        """Return the number of page table changes that fit: one per decoding row and table.

        Prompts send theirs ahead of the step.
        """
        return 0 if self.shape.num_blocks else self.shape.num_singles * self.num_tables

    @cached_property
    def padding(self) -> np.ndarray:
        """Return the vector of a step that does nothing, int32 [W]."""
        vector = np.zeros(self.slices.adapter_places.stop, np.int32)
        vector[self.slices.block_nexts] = -1
        vector[self.slices.adapter_places] = -1
        vector[self.slices.single_positions] = -1
        vector[self.slices.sample_rows] = self.num_rows
        vector[self.slices.change_rows] = self.num_rows
        return vector


@jax.named_scope("row_update")
def change_pages(state: DeviceState, vector_W: jax.Array, *, layout: InputLayout) -> jax.Array:
    """Return the page table after a step's changes, on a device."""
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
    layer_pages: tuple[StatePages, ...] = (),
) -> DeviceInput:
    """Return the step that `vector_W` and the state of its rows describe, on a device; the page table is up to date."""
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
    if layout.max_together > 1:
        batch = replace(batch, sequences_U=single_rows, max_together=layout.max_together)
    places_S, rows_S = vector_W[at.sample_places], vector_W[at.sample_rows]
    sampling, penalties = sampling_of(state, rows_S, positions_S=positions_T[places_S] + 1)
    nexts_B, adapters = vector_W[at.block_nexts], None
    if shape.num_adapters:
        adapters = TokenAdapters(vector_W[at.adapter_slots], vector_W[at.adapter_places][block_of_T])
    return DeviceInput(batch, places_S, rows_S, sampling, penalties, nexts_B, adapters)


def _awaited(
    draft: DraftState, rows_S: jax.Array, positions_S: jax.Array, ids_S: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return positions and ids of single tokens, with awaited entries filled in from the draft's state."""
    depths_S = AWAITED - positions_S
    ahead_S = draft.positions_R[rows_S] + 1 + depths_S
    drafts_S = draft.drafts_RK[rows_S, jnp.maximum(depths_S - 1, 0)]
    return jnp.where(depths_S >= 0, ahead_S, positions_S), jnp.where(ids_S == DRAFTED, drafts_S, ids_S)


def sampling_of(state: DeviceState, rows_S: jax.Array, *, positions_S: jax.Array) -> tuple[SamplingBatch, Penalties]:
    """Return the sampling parameters and penalties of samples of `rows_S` at `positions_S`.

    Padding is greedy and has no penalties.
    """
    is_real_S = rows_S < state.last_tokens_R.shape[0]
    floats = RowFloats(*jnp.where(is_real_S[:, None], state.sampling_floats_RF[rows_S], jnp.array(RowFloats())).T)
    integers = RowIntegers(*jnp.where(is_real_S[:, None], state.sampling_integers_RI[rows_S], 0).T)
    columns = integers._asdict() | floats._asdict()
    sampling = SamplingBatch(
        temperature_S=floats.temperature,
        limits=Limits(**{name: columns[name.removesuffix("_S")] for name in Limits._fields}),
        seed_S=integers.seed,
        choice_S=integers.choice,
        position_S=positions_S.astype(jnp.uint32),
        num_top_S=integers.num_top,
    )
    penalties = (floats.repetition_penalty, floats.presence_penalty, floats.frequency_penalty)
    withholds_S = sampling.position_S < integers.first_end
    return sampling, Penalties((integers.adjusts > 0) | withholds_S, *penalties, withholds_S)
