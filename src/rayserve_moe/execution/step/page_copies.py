"""Copying the last page of a prompt to the choices that have forked off it, in the pools of all layers."""

# C copies   L layers   G page tables of a row

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.execution.step.pytrees import DeviceState
from rayserve_moe.kernels.kv_pool import LayerPages, num_tables
from rayserve_moe.kernels.table import Kernel
from rayserve_moe.scheduling.step_plan import StepPlan

MAX_COPIES = 16
COPY_FIELDS = 4
COPIES_SIZE = MAX_COPIES * COPY_FIELDS
"""A vector of copies: of each the rank, the row that is copied from, the row that it goes to, both the rank's own, and
where their prompt ends: a page that ends there, too, is not copied. A rank of -1 marks padding."""


def copy_vectors(plan: StepPlan, *, rows_per_rank: int) -> Iterator[np.ndarray]:
    """Cut what is copied after the step of a plan with forks into vectors int32 [COPIES_SIZE]."""
    chunks = plan.chunks
    forks = np.flatnonzero(chunks.lengths == 0)
    ranks, rows = np.divmod(chunks.rows[forks], rows_per_rank)
    sources = chunks.rows[chunks.sources[forks]] % rows_per_rank
    copies = np.stack([ranks, sources, rows, chunks.starts[forks]], axis=1)
    for first in range(0, len(copies), MAX_COPIES):
        some = copies[first : first + MAX_COPIES]
        vector = no_copies()
        vector[: some.size] = some.reshape(-1)
        yield vector


def no_copies() -> np.ndarray:
    """A vector that copies nothing."""
    vector = np.zeros(COPIES_SIZE, np.int32)
    vector[::COPY_FIELDS] = -1
    return vector


def apply_copies(
    state: DeviceState, vector: jax.Array, *, data_rank: jax.Array, layer_pages: tuple[LayerPages, ...], copy: Kernel
) -> DeviceState:
    """On one device: copy the pages of this data rank, of each layer where `layer_pages` says that it has them, by
    `kv_pool.copy_pages` or another such kernel."""
    page_size, num_groups = state.kv_pages.shape[1], num_tables(layer_pages)
    ranks_C, sources_C, targets_C, ends_C = vector.reshape(MAX_COPIES, COPY_FIELDS).T
    columns_CG = (ends_C // page_size)[:, None] * num_groups + jnp.arange(num_groups)
    is_own_C1 = ((ranks_C == data_rank) & (ends_C % page_size > 0))[:, None]
    from_CG, to_CG = (
        # Page 0 of a layer, which belongs to no sequence, is copied to itself.
        jnp.where(is_own_C1, state.page_table_RP.at[rows_C[:, None], columns_CG].get(mode="clip"), 0)
        for rows_C in (sources_C, targets_C)
    )
    num_copies = jnp.sum(ranks_C >= 0)

    def copied(pool: jax.Array, layers: tuple[LayerPages, ...]) -> jax.Array:
        table_L, first_L, _ = np.array(layers, np.int32).T
        sources_N, targets_N = ((first_L + pages_CG[:, table_L]).reshape(-1) for pages_CG in (from_CG, to_CG))
        return copy(pool, sources_N, targets_N, num_copies * len(layers))

    state = replace(state, kv_pages=copied(state.kv_pages, layer_pages))
    if state.draft is None:
        return state
    own = (LayerPages(0, 0, len(state.draft.kv_pages)),)
    return replace(state, draft=state.draft._replace(kv_pages=copied(state.draft.kv_pages, own)))
