"""Helpers of drafting: page tables with scratch pages, noise, and access to the draft model's weights and state."""

# S rows that draft   P page-table width   V ids of the draft's head

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.execution.step.pytrees import DeviceState, DraftState, ModelWeights
from rayserve_moe.kernels.reference.layers import gumbel_noise_of
from rayserve_moe.model.draft_layer import DraftConfig
from rayserve_moe.model.transformer import Parameters


def scratch_pages(num_ahead: int, page_size: int) -> int:
    """Return the number of scratch pages of a row for `num_ahead` drafts that are not verified yet."""
    return -(-num_ahead // page_size)


def with_scratch(
    state: DeviceState, rows_S: jax.Array, *, positions_S: jax.Array, num_scratch: int, num_columns: int
) -> jax.Array:
    """Return the page tables of rows, with the row's scratch pages after the page of its last position.

    A row has `num_columns` values of entries after its page table.
    """
    num_pages, page_size = jax.tree.leaves(draft_of(state).pools)[0].shape[:2]
    first_scratch = num_pages - len(state.last_tokens_R) * num_scratch
    width = state.page_table_RP.shape[1] - num_columns
    table_SP = state.page_table_RP[:, :width].at[rows_S].get(mode="clip")
    beyond_SP = jnp.arange(table_SP.shape[1]) - (positions_S // page_size)[:, None]
    scratch_SP = first_scratch + rows_S[:, None] * num_scratch + beyond_SP - 1
    is_scratch_SP = (beyond_SP > 0) & (beyond_SP <= num_scratch) & (positions_S >= 0)[:, None]
    return jnp.where(is_scratch_SP, scratch_SP, table_SP)


def noise_for(weights: ModelWeights, config: DraftConfig) -> tuple[Callable[..., jax.Array], jax.Array | None]:
    """Return the target's noise for the draft's ids, and the target's id of each draft id if they differ."""
    words = weights_of_both(weights)[1]["draft"].get("target_ids_V")
    return config.target.kernels.sampling.noise if words is None else partial(_noise_of_words, words), words


def _noise_of_words(
    words_V: jax.Array, seed_S: jax.Array, choice_S: jax.Array, position_S: jax.Array, *, first: jax.Array, size: int
) -> jax.Array:
    """Return the noise of the target's ids for the draft's ids, from `first` on."""
    ids_V = words_V.at[first + jnp.arange(size)].get(mode="clip")
    return gumbel_noise_of(ids_V, seed_S, choice_S, position_S)


def weights_of_both(weights: ModelWeights) -> tuple[Parameters, Parameters]:
    """Return the weights of the target and of the draft model."""
    assert weights.draft is not None, "no draft model is loaded"
    return weights.params, weights.draft


def draft_of(state: DeviceState) -> DraftState:
    """Return the state of the draft model."""
    assert state.draft is not None, "no draft model is loaded"
    return state.draft
