"""Adapters as arguments of the native kernels (see `calls`)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.adapters import LayerAdapters


def adapter_arguments(adapters: LayerAdapters | None, names: Sequence[str]) -> list[jax.Array]:
    """Return the trailing arguments of a kernel with adapters for the parameters `names`.

    They are the slots of tokens, and the pair of each parameter; nothing without adapters.
    """
    if adapters is None:
        return []
    nothing = jnp.zeros(0, jnp.bfloat16)
    pairs = (adapters.pairs.get(name, (nothing, nothing)) for name in names)
    return [adapters.tokens.slot_T, *(array for pair in pairs for array in pair)]
