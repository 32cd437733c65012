"""The states that a model's layers keep of sequences: kinds, sizes, and the shapes of their pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.kv_pool import LayerPages, held_shape
from rayserve_moe.model.layers.table import MIXERS
from rayserve_moe.model.model_config import ModelConfig, Pools
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.state.kinds import ArraySpec, StateKind


class KeptState(NamedTuple):
    """A kind of state, and the layers that keep it."""

    kind: StateKind
    windows: tuple[int, ...]
    """Number of positions that a token sees in each layer that keeps the state. 0: all."""

    @property
    def num_layers(self) -> int:
        """Return the number of layers that keep it."""
        return len(self.windows)

    def row_bytes(self, plan: ParallelPlan, *, dtype: str) -> int:
        """Return the bytes of a token's row in one layer on one device; `dtype` is that of the KV cache."""
        return sum(
            math.prod(plan.sharding(array.axes).shard_shape(array.shape)) * jnp.dtype(array.dtype or dtype).itemsize
            for array in self.kind.entry
        )


def states_of(config: ModelConfig) -> tuple[KeptState, ...]:
    """Return what the layers of a model keep; the kinds that are kept per token share page tables."""
    spec, kernels, tensor_size = config.spec, config.kernels, config.plan.tensor_size
    found = tuple(
        KeptState(kind, tuple(spec.layers[layer].window for layer in spec.layers_with_mixer(mixer.kind)))
        for mixer in spec.mixers
        for kind in MIXERS[mixer.kind].states(mixer, kernels=kernels, tensor_size=tensor_size)
    )
    assert len(found) == 1 or not spec.has_windows, "windows of layers that share page tables"
    return found


def windows_within(windows: Sequence[int], *, max_tokens: int) -> tuple[int, ...]:
    """Return the windows, 0 (all) for those that hold every sequence of up to `max_tokens` tokens."""
    return tuple(window if window < max_tokens else 0 for window in windows)


def layer_kinds(config: ModelConfig, *, max_tokens: int) -> tuple[StateKind, ...]:
    """Return the kind with pages of its own of each layer that keeps it, for sequences of up to `max_tokens` tokens."""
    kept = states_of(config)[0]
    return tuple(replace(kept.kind, window=window) for window in windows_within(kept.windows, max_tokens=max_tokens))


def layer_pages_of(kinds: Sequence[StateKind], groups: Sequence[tuple[str, int, int]]) -> tuple[LayerPages, ...]:
    """Return where layers with `kinds` have their pages, layer by layer; empty if all layers have one table.

    `groups` are the name and window of each kind, and its pages per layer (`state.groups.PageGroup`).
    """
    if len(groups) == 1:
        return ()
    of_kind = {(name, window): (table, size) for table, (name, window, size) in enumerate(groups)}
    tables, sizes = zip(*(of_kind[kind.table_key] for kind in kinds), strict=True)
    return tuple(map(LayerPages, tables, accumulate(sizes, initial=0), sizes))


def pool_shapes(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: str, layer_pages: tuple[LayerPages, ...] = ()
) -> Pools:
    """Return shapes, dtypes and shardings of the pools of all data ranks.

    There are `num_pages` pages of every layer and rank, or as many as `layer_pages` says.
    """
    plan, held = config.plan, config.kernels.pool.dtypes.get(dtype, dtype)

    def row_of(array: ArraySpec) -> tuple[int, ...]:
        return array.shape if array.dtype else held_shape(array.shape, dtype, held=held)

    def shapes(state: KeptState) -> tuple[Any, ...]:
        assert state.kind.per == "token", f"{state.kind.name} has no pages"
        total = sum(layer.num_pages for layer in layer_pages) or state.num_layers * num_pages
        return tuple(
            jax.ShapeDtypeStruct(
                (plan.data_size * total, page_size, *row_of(array)),
                array.dtype or held,
                sharding=plan.sharding(pool_axes(array.axes)),
            )
            for array in state.kind.entry
        )

    return {state.kind.name: shapes(state) for state in states_of(config)}


def pool_axes(axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Return the logical axes of a pool whose rows have `axes`, over all data ranks."""
    return ("data_ranks", None, *axes)


def pool_partitions(config: ModelConfig) -> Pools:
    """Return the tree of the pools with partitions for arrays."""
    return cast(
        Pools,
        {
            state.kind.name: tuple(config.plan.partition(pool_axes(array.axes)) for array in state.kind.entry)
            for state in states_of(config)
        },
    )


def page_size_of(pools: Pools) -> int:
    """Return the number of tokens of a page."""
    return jax.tree.leaves(pools)[0].shape[1]
