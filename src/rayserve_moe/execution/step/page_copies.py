"""Copies of the last page of a prompt for the choices that fork off it, in the pools of all layers."""

# C copies   L layers   G page tables of a row

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.execution.step.pytrees import DeviceState
from rayserve_moe.kernels.kv_pool import LayerPages, StatePages, copy_pages, num_tables
from rayserve_moe.kernels.operations import Kernel
from rayserve_moe.scheduling.step_plan import StepPlan

MAX_COPIES = 16
COPY_FIELDS = 4
COPIES_SIZE = MAX_COPIES * COPY_FIELDS
"""Size of a vector of copies.

Each copy has a rank (-1 marks padding), the source row, the target row, both the rank's own, and the end of the prompt.

A prompt that ends with a page needs no copy of it.
"""


def copy_vectors(plan: StepPlan, *, rows_per_rank: int) -> Iterator[np.ndarray]:
    """Yield the copies after the step of a plan with forks, as vectors int32 [COPIES_SIZE]."""
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
    """Return a vector without copies."""
    vector = np.zeros(COPIES_SIZE, np.int32)
    vector[::COPY_FIELDS] = -1
    return vector


def apply_copies(
    state: DeviceState,
    vector: jax.Array,
    *,
    data_rank: jax.Array,
    layer_pages: Sequence[StatePages],
    copy: Kernel,
    num_rings: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> DeviceState:
    """Copy the pages and rings of this data rank on a device, by `kv_pool.copy_pages` or an equivalent kernel.

    `layer_pages` gives the page ranges of the layers of token kinds. `num_rings` gives, by state kind, the number of
    layers and the number of row arrays, which come last.
    """
    page_size, num_groups = state.pools[layer_pages[0].state][0].shape[1], num_tables(layer_pages)
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

    def with_rings(arrays: tuple[jax.Array, ...], num_layers: int, num_arrays: int) -> tuple[jax.Array, ...]:
        num_rows, is_own_C = len(arrays[-1]) // num_layers, ranks_C == data_rank
        first_L = num_rows * jnp.arange(num_layers)
        # The ring of a row that copies nothing is copied to itself.
        from_N, to_N = (
            (jnp.where(is_own_C, rows_C, 0)[:, None] + first_L).reshape(-1) for rows_C in (sources_C, targets_C)
        )
        rings = (copy_pages(ring, from_N, to_N, num_copies * num_layers) for ring in arrays[-num_arrays:])
        return (*arrays[:-num_arrays], *rings)

    of_states = dict(layer_pages)
    pools = {
        name: with_rings(arrays, *num_rings[name])
        if name in num_rings
        else tuple(copied(pool, of_states[name]) for pool in arrays)
        for name, arrays in state.pools.items()
    }
    state = replace(state, pools=pools)
    if state.draft is None:
        return state
    own = jax.tree.map(lambda pool: copied(pool, equal_pages((pool,), 1)), state.draft.pools)
    return replace(state, draft=state.draft._replace(pools=own))


def equal_pages(pools: tuple[jax.Array, ...], num_layers: int) -> tuple[LayerPages, ...]:
    """Return the page ranges of layers that share pools equally and have a single page table."""
    size = len(pools[0]) // num_layers
    return tuple(LayerPages(0, layer * size, size) for layer in range(num_layers))
