"""Copies of whole pages and entries out of the pools of all layers, and back into them."""

# M copies   P places: page tables, then entry groups   L layers   N = M L

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.execution.step.function import state_partitions
from rayserve_moe.execution.step.pytrees import DeviceState, StepConfig
from rayserve_moe.kernels.kv_pool import LayerPages, num_tables
from rayserve_moe.model.states import entry_states, token_states

MAX_MOVES = 16
"""Pages of a data rank that a program copies."""

PageArrays = tuple[jax.Array, ...]
"""The rows of MAX_MOVES pages in every pool, [N, ...] of each data rank, in the order of `_pools`."""


class _Pool(NamedTuple):
    array: jax.Array
    num_layers: int
    layers: tuple[LayerPages, ...] = ()
    """Page ranges; empty for layers that share the array equally."""
    place: int = 0
    """Place of the rows of such layers."""
    is_entry: bool = False

    @property
    def places_L(self) -> jax.Array:
        """Return the place of the rows of each layer."""
        return jnp.array([layer.table for layer in self.layers] or [self.place] * self.num_layers, jnp.int32)

    def rows_N(self, places_MP: jax.Array) -> jax.Array:
        """Return the rows of the pages at `places`, int32 [N]."""
        size = len(self.array) // self.num_layers
        first_L = [layer.first_page for layer in self.layers] or [size * layer for layer in range(self.num_layers)]
        return (jnp.array(first_L, jnp.int32) + places_MP[:, self.places_L]).reshape(-1)


class MovedShape(NamedTuple):
    """Shape of the rows that a program copies from or to a pool, of all data ranks."""

    rows: jax.ShapeDtypeStruct
    num_layers: int
    is_entry: bool
    """True for rows of entries, False for rows of pages."""


def num_places(config: StepConfig) -> int:
    """Return the number of places of a page: its page tables, and its entry groups."""
    return num_tables(config.layer_pages) + len(entry_states(config.model))


def moved_shapes(state: DeviceState, config: StepConfig) -> tuple[MovedShape, ...]:
    """Return the shapes of `PageArrays`, with the shardings of the pools."""

    def shape_of(pool: _Pool) -> MovedShape:
        num_rows = config.model.plan.data_size * MAX_MOVES * pool.num_layers
        shape = (num_rows, *pool.array.shape[1:])
        rows = jax.ShapeDtypeStruct(shape, pool.array.dtype, sharding=pool.array.sharding)
        return MovedShape(rows, pool.num_layers, pool.is_entry)

    return tuple(map(shape_of, _pools(state, config)))


def read_pages(state: DeviceState, places_RMP: jax.Array, *, config: StepConfig) -> PageArrays:
    """Return the rows of pages at `places` of every data rank. Rows of place 0 stand for none."""
    plan, parts = config.model.plan, state_partitions(config.model, config.draft)

    def on_device(state: DeviceState, places_RMP: jax.Array) -> PageArrays:
        places_MP = places_RMP[plan.data_rank()]
        return tuple(_read(pool, pool.rows_N(places_MP)) for pool in _pools(state, config))

    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(parts, PartitionSpec()),
        out_specs=tuple(cast(PartitionSpec, pool.array) for pool in _pools(parts, config)),
        check_vma=False,
    )(state, places_RMP)


def write_pages(state: DeviceState, places_RMP: jax.Array, *, pages: PageArrays, config: StepConfig) -> DeviceState:
    """Write the rows of `pages` to `places` of every data rank; rows of place 0 are dropped."""
    plan, parts = config.model.plan, state_partitions(config.model, config.draft)

    def on_device(state: DeviceState, places_RMP: jax.Array, pages: PageArrays) -> DeviceState:
        places_MP = places_RMP[plan.data_rank()]
        arrays = {}
        for pool, rows in zip(_pools(state, config), pages, strict=True):
            are_set = places_MP[:, pool.places_L].reshape(-1) > 0
            targets_N = jnp.where(are_set, pool.rows_N(places_MP), len(pool.array))
            arrays[id(pool.array)] = config.model.kernels.pool.put_pages(pool.array, rows, targets_N)
        return jax.tree.map(lambda array: arrays.get(id(array), array), state)

    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(parts, PartitionSpec(), tuple(cast(PartitionSpec, pool.array) for pool in _pools(parts, config))),
        out_specs=parts,
        check_vma=False,
    )(state, places_RMP, pages)


def _read(pool: _Pool, rows_N: jax.Array) -> jax.Array:
    """Return rows of a pool [N, ...]. Entries are read one by one: for a gather XLA:TPU copies all of them first."""
    if not pool.is_entry:
        return pool.array[rows_N]

    def read_one(number: jax.Array, read: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(pool.array, rows_N[number], 1)
        return jax.lax.dynamic_update_slice_in_dim(read, row, number, axis=0)

    return jax.lax.fori_loop(
        0, len(rows_N), read_one, jnp.zeros((len(rows_N), *pool.array.shape[1:]), pool.array.dtype)
    )


def _pools(state: DeviceState, config: StepConfig) -> Iterator[_Pool]:
    """Yield the arrays of a state that hold pages or entries; arrays may be shapes or partitions."""
    of_states, first_entry = dict(config.layer_pages), num_tables(config.layer_pages)
    for kept in token_states(config.model):
        for array in state.pools[kept.kind.name]:
            yield _Pool(array, kept.num_layers, of_states.get(kept.kind.name, ()))
    for place, kept in enumerate(entry_states(config.model), first_entry):
        for array in state.pools[kept.kind.name][: len(kept.kind.entry)]:
            yield _Pool(array, kept.num_layers, place=place, is_entry=True)
    if state.draft is not None:
        for array in jax.tree.leaves(state.draft.pools, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)):
            yield _Pool(array, 1)
