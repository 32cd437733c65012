"""States that layers keep of sequences: kinds, sizes, and shapes of their pools."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.kv_pool import LayerPages, StatePages, held_shape
from rayserve_moe.model.layers.table import MIXERS
from rayserve_moe.model.model_config import ModelConfig, Pools
from rayserve_moe.model.spec import MixerSpec
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.state.kinds import ArraySpec, StateKind


class KeptState(NamedTuple):
    """State kind with the layers that keep it."""

    kind: StateKind
    windows: tuple[int, ...]
    """Window of each layer that keeps the state; 0 for all positions."""

    @property
    def num_layers(self) -> int:
        """Return the number of layers that keep the state."""
        return len(self.windows)

    def row_bytes(self, plan: ParallelPlan, *, dtype: str) -> int:
        """Return the bytes of a token's row, or of an entry, per layer and device; `dtype` belongs to the KV cache."""
        return _num_bytes(self.kind.entry, plan, dtype=dtype)

    def ring_bytes(self, plan: ParallelPlan, *, dtype: str) -> int:
        """Return the bytes of a running row per layer and device, besides its entries."""
        return _num_bytes(self.kind.ring, plan, dtype=dtype)


def states_of(config: ModelConfig) -> tuple[KeptState, ...]:
    """Return the states of a model's layers; layers with the same window share page tables, whatever their state."""
    spec, kernels, tensor_size = config.spec, config.kernels, config.plan.tensor_size
    layers: dict[StateKind, set[int]] = {}
    for mixer in spec.mixers:
        for declared in MIXERS[mixer.kind].states(mixer, kernels=kernels, tensor_size=tensor_size):
            kind = declared.stored_in(dict(config.state_dtypes).get(declared.name, ""))
            if not 0 < config.table_tokens <= kind.unread_within:
                layers.setdefault(kind, set()).update(spec.layers_with_mixer(mixer.kind))
    found = tuple(
        KeptState(kind, tuple(spec.layers[layer].window for layer in sorted(of_kind)))
        for kind, of_kind in layers.items()
    )
    assert len({state.kind.name for state in found}) == len(found), "layers that keep a state have equal rows"
    assert any(state.kind.per == "token" for state in found), "sequences have pages"
    return found


def state_of_mixer(config: ModelConfig, mixer: MixerSpec) -> KeptState:
    """Return the state that a kind of mixer attends, which comes first."""
    kind, *_ = MIXERS[mixer.kind].states(mixer, kernels=config.kernels, tensor_size=config.plan.tensor_size)
    return next(state for state in states_of(config) if state.kind == kind)


def token_states(config: ModelConfig) -> tuple[KeptState, ...]:
    """Return the states that layers keep per token, on pages."""
    return tuple(state for state in states_of(config) if state.kind.per == "token")


def entry_states(config: ModelConfig) -> tuple[KeptState, ...]:
    """Return the states that layers keep as entries at intervals of tokens, with a ring per row."""
    return tuple(state for state in states_of(config) if state.kind.per == "entry")


def windows_within(windows: Sequence[int], *, max_tokens: int) -> tuple[int, ...]:
    """Return the windows, with 0 (all) for windows that cover every sequence of up to `max_tokens` tokens."""
    return tuple(window if window < max_tokens else 0 for window in windows)


def states_within(config: ModelConfig, *, max_tokens: int) -> tuple[KeptState, ...]:
    """Return `token_states` with the windows of sequences of up to `max_tokens` tokens."""
    return tuple(
        state._replace(windows=windows_within(state.windows, max_tokens=max_tokens)) for state in token_states(config)
    )


def layer_pages_of(states: Iterable[KeptState], groups: Sequence[tuple[int, int]]) -> tuple[StatePages, ...]:
    """Return the page table and page range of each layer of token kinds; empty if all layers share a table.

    `groups` hold a window and the pages of each layer with it (`state.groups.PageGroup`).
    """
    if len(groups) == 1:
        return ()
    of_window = {window: (table, size) for table, (window, size) in enumerate(groups)}

    def pages_of(windows: Sequence[int]) -> tuple[LayerPages, ...]:
        tables, sizes = zip(*(of_window[window] for window in windows), strict=True)
        return tuple(map(LayerPages, tables, accumulate(sizes, initial=0), sizes))

    return tuple(StatePages(state.kind.name, pages_of(state.windows)) for state in states)


class PoolCounts(NamedTuple):
    """Sizes of a data rank's pools, per layer."""

    num_pages: int
    num_entries: int = 0
    """Entries of entry kinds."""
    num_rows: int = 0
    """Rows with a ring, of entry kinds."""


def pool_shapes(
    config: ModelConfig, counts: PoolCounts, *, page_size: int, dtype: str, layer_pages: tuple[StatePages, ...] = ()
) -> Pools:
    """Return shapes, dtypes and shardings of the pools of all data ranks.

    Every layer and rank has the number of pages in `counts` or, by layer, in `layer_pages`.
    """
    plan, held, of_layers = config.plan, config.kernels.pool.dtypes.get(dtype, dtype), dict(layer_pages)

    def stacked(array: ArraySpec, count: int, *inner: int) -> Any:
        own = config.kernels.pool.dtypes.get(array.dtype, array.dtype)
        row = array.shape if array.dtype else held_shape(array.shape, dtype, held=held)
        shape, axes = (plan.data_size * count, *inner, *row), ("data_ranks", *[None] * len(inner), *array.axes)
        return jax.ShapeDtypeStruct(shape, own or held, sharding=plan.sharding(axes))

    def shapes(state: KeptState) -> tuple[Any, ...]:
        num_layers = state.num_layers
        if state.kind.per == "entry":
            entries = (stacked(array, num_layers * counts.num_entries) for array in state.kind.entry)
            return (*entries, *(stacked(array, num_layers * counts.num_rows) for array in state.kind.ring))
        of_state = of_layers.get(state.kind.name, ())
        total = sum(layer.num_pages for layer in of_state) or num_layers * counts.num_pages
        return tuple(stacked(array, total, page_size) for array in state.kind.entry)

    return {state.kind.name: shapes(state) for state in states_of(config)}


def pool_partitions(config: ModelConfig) -> Pools:
    """Return the tree of the pools with partitions instead of arrays."""
    return cast(
        Pools,
        {
            state.kind.name: tuple(
                config.plan.partition(("data_ranks", *[None] * (state.kind.per == "token"), *array.axes))
                for array in (*state.kind.entry, *state.kind.ring)
            )
            for state in states_of(config)
        },
    )


def _num_bytes(arrays: Iterable[ArraySpec], plan: ParallelPlan, *, dtype: str) -> int:
    """Return the bytes of a row of arrays on a device; `dtype` belongs to the KV cache."""
    return sum(
        math.prod(plan.sharding(array.axes).shard_shape(array.shape)) * jnp.dtype(array.dtype or dtype).itemsize
        for array in arrays
    )


def page_size_of(pools: Pools) -> int:
    """Return the number of tokens per page; all pools must be of token kinds."""
    return jax.tree.leaves(pools)[0].shape[1]
