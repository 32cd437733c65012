"""Adapters as arguments of the native kernels (see `calls`)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.adapters import AdapterPair, ExpertAdapters, LayerAdapters, RowAdapters


def adapter_arguments(adapters: LayerAdapters | None, names: Sequence[str]) -> list[jax.Array]:
    """Return the trailing arguments of a kernel with adapters for the parameters `names`.

    They are the slots of tokens, and the pair of each parameter; nothing without adapters.
    """
    if adapters is None:
        return []
    return [adapters.tokens.slot_T, *(array for name in names for array in _pair(adapters, name))]


def expert_arguments(adapters: RowAdapters | None) -> list[jax.Array]:
    """Return `adapter_arguments` of experts."""
    if adapters is None:
        return []
    return [adapters.slot_T, *(array for pair in adapters.experts for array in pair or _empty_pair())]


def row_adapters(adapters: LayerAdapters | None, names: Sequence[str]) -> RowAdapters | None:
    """Return the adapters of an MLP in the form of a single expert per layer; `names` are gate, up and down."""
    if adapters is None:
        return None
    return RowAdapters(ExpertAdapters(*(_pair(adapters, name) for name in names)), adapters.tokens.slot_T)


def _pair(adapters: LayerAdapters, name: str) -> AdapterPair:
    """Return the pair of a parameter; empty if adapters never change it."""
    return adapters.pairs.get(name) or _empty_pair()


def _empty_pair() -> AdapterPair:
    nothing = jnp.zeros(0, jnp.bfloat16)
    return AdapterPair(nothing, nothing)
