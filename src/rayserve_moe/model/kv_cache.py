"""What the paged cache holds of one token in one layer: the one statement of its shape, which all who size it ask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from rayserve_moe.kernels.kv_pool import LayerPages
from rayserve_moe.kernels.tpu.flat_rows import flat_width, latent_lanes
from rayserve_moe.model.parameters import kv_repeats
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.state.kinds import ArraySpec, StateKind


class CacheRow(NamedTuple):
    """The entry of a token in a layer: its shape over the whole tensor axis, and the logical axes of that shape."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    @property
    def pool_axes(self) -> tuple[str | None, ...]:
        """Logical axes of the pool [layers * pages, page, *shape] over all data ranks."""
        return ("data_ranks", None, *self.axes)

    def local_size(self, plan: ParallelPlan) -> int:
        """Elements of an entry on one device."""
        return math.prod(plan.sharding(self.axes).shard_shape(self.shape))


def cache_row(spec: ModelSpec, *, tensor_size: int, is_flat: bool = False) -> CacheRow:
    """The entry of a model's cache: [2 * KV heads, h], K and V of a head next to each other, spread with the heads.

    With latent attention [1, kv_lora_rank + rope_dim], the same on all devices of the tensor axis: the latent serves
    all heads, as key (with the rotated part) and as value. `is_flat` (`AttentionKernels.has_flat_rows`): one
    dimension, as `kernels.tpu.flat_rows` has it.
    """
    attention = spec.attention
    if attention.latent is not None:
        width = attention.latent.kv_lora_rank + attention.latent.rope_dim
        return CacheRow((latent_lanes(width),), (None,)) if is_flat else CacheRow((1, width), (None, None))
    num_heads = attention.num_kv_heads * kv_repeats(spec, tensor_size)
    if is_flat:
        return CacheRow((tensor_size * flat_width(num_heads // tensor_size, attention.head_dim),), ("kv_heads",))
    return CacheRow((2 * num_heads, attention.head_dim), ("kv_heads", None))


def windows_of(spec: ModelSpec, *, longest: int) -> tuple[int, ...]:
    """How many positions each layer sees, 0 for all: also where no sequence is longer than its window."""
    windows = spec.attention.windows or (0,) * spec.num_layers
    return tuple(window if window < longest else 0 for window in windows)


def cache_kinds(spec: ModelSpec, *, longest: int, tensor_size: int, is_flat: bool = False) -> tuple[StateKind, ...]:
    """Return the state kind of each layer, for sequences of up to `longest` tokens; `is_flat`: see `cache_row`."""
    row = cache_row(spec, tensor_size=tensor_size, is_flat=is_flat)
    name, entry = "kv" if spec.attention.latent is None else "latent", (ArraySpec(row.shape, row.axes),)
    return tuple(StateKind(name, "token", entry, window=window) for window in windows_of(spec, longest=longest))


def layer_pages_of(kinds: Sequence[StateKind], groups: Sequence[tuple[str, int, int]]) -> tuple[LayerPages, ...]:
    """Return where layers with `kinds` have their pages, layer after layer, or nothing if all have one table.

    `groups` are the name and window of each kind, and its pages per layer (`state.groups.PageGroup`).
    """
    if len(groups) == 1:
        return ()
    of_kind = {(name, window): (table, size) for table, (name, window, size) in enumerate(groups)}
    tables, sizes = zip(*(of_kind[kind.table_key] for kind in kinds), strict=True)
    return tuple(map(LayerPages, tables, accumulate(sizes, initial=0), sizes))
